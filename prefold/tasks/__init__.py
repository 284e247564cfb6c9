"""Tasks turn items into requests, and the engine's results into answers. They never import torch.

`base.py` defines the interface; `make_task` makes a task for a checkpoint.
"""

from __future__ import annotations

from .base import Inputs, Task, Work
from .classify import ClassifyHeadTask, ClassifyItem, ClassifyTask
from .decide import DecideItem, DecideTask
from .embed import EmbedItem, EmbedTask
from .generate import GenerateItem, GenerateTask
from .make import TASKS, end_ids, make_task, recommended_sampling
from .rerank import RerankItem, RerankTask
from .score import ScoreItem, ScoreTask
from .sentence import EmbedSettings, embed_settings
