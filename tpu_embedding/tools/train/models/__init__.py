"""Models of the run configs; each one owns a `TPUEmbedding`.

`click` (which also has the shared parts) and `dlrm` (also DLRM-DCNv2) predict clicks.
`two_tower` retrieves items.
"""

from tpu_embedding.tools.train.models.click import ClickModelConfig as ClickModelConfig
from tpu_embedding.tools.train.models.dlrm import DLRMConfig as DLRMConfig
from tpu_embedding.tools.train.models.dlrm import DLRMDCNv2Config as DLRMDCNv2Config
from tpu_embedding.tools.train.models.two_tower import TwoTowerConfig as TwoTowerConfig
