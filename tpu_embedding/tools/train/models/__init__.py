"""Models of the run configs; each owns one `TPUEmbedding`.

`click` has what they share. `click` and `dlrm` (also DLRM-DCNv2) predict clicks, and
`two_tower` retrieves items.
"""

from tpu_embedding.tools.train.models.click import ClickModelConfig as ClickModelConfig
from tpu_embedding.tools.train.models.dlrm import DLRMConfig as DLRMConfig
from tpu_embedding.tools.train.models.dlrm import DLRMDCNv2Config as DLRMDCNv2Config
from tpu_embedding.tools.train.models.two_tower import TwoTowerConfig as TwoTowerConfig
