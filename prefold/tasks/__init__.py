"""Tasks turn what is wanted of a text into requests, and the engine's results into answers. They never import torch.

See `base.py` for the protocol; `make_task` makes a task the way a checkpoint wants it.
"""

from __future__ import annotations

from .base import Inputs, Task, Work
from .classify import ClassifyHeadTask, ClassifyItem, ClassifyTask
from .embed import EmbedItem, EmbedTask
from .generate import GenerateItem, GenerateTask
from .make import TASKS, generation_settings, make_task
from .rerank import RerankItem, RerankTask
from .score import ScoreItem, ScoreTask
from .sentence import EmbedSettings, embed_settings
