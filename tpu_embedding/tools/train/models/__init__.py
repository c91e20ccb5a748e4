"""Models for the run configs.

`click` and `dlrm` predict clicks, and `two_tower` retrieves items. `click` also has the
model interface and the parts that models share.
"""

from tpu_embedding.tools.train.models.click import ClickModelConfig as ClickModelConfig
from tpu_embedding.tools.train.models.dlrm import DLRMConfig as DLRMConfig
from tpu_embedding.tools.train.models.dlrm import DLRMDCNv2Config as DLRMDCNv2Config
from tpu_embedding.tools.train.models.two_tower import TwoTowerConfig as TwoTowerConfig
