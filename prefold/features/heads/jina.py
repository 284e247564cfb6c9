"""Listwise rerankers of Jina (v3, v3.5): a projector over the hidden states after each document and after the query.

The projector is two linears with a ReLU between them. It is among the weights of JinaForRanking, or in
projector.safetensors beside them. A document's score is the cosine between its projected vector and the query's. A list
is split if it has more than 125 documents or does not fit into one prompt. The query's vector is then the mean over the
prompts, each weighted by its best score. Version 3.5 has sliding windows in some layers, and leaves more tokens of a
prompt free. Tested with random weights against the formula, because no published checkpoint was available.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...checkpoint import Checkpoint
from ...checkpoint.settings import Settings
from ...errors import UnsupportedModelError
from ...model.config import ModelConfig
from ...model.decoders import qwen3
from ...model.families import HFConfig, add_families
from ...tasks.base import Text
from ...tasks.listwise import NEEDED, RANKERS, ListReader
from .tensors import HeadTensors

PROJECTOR = "projector.safetensors"
# Names of the two linears among the model's weights, and in the projector's own file.
_WITHIN, _BESIDE = ("projector.0.weight", "projector.2.weight"), ("linear1.weight", "linear2.weight")
_HEAD = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how "
    "relevant they are to the query. If the query is a question, how relevant a passage is depends on how well it "
    "answers the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
    "the intent. If an instruction is provided, you should follow the instruction when determining the ranking."
    "<|im_end|>\n<|im_start|>user\n"
)
_ASK = (
    "I will provide you with {} passages, each indicated by a numerical identifier. Rank the passages based on their "
    "relevance to query: "
)


def jina_ranker(hf: HFConfig) -> ModelConfig:
    """A listwise reranker: Qwen 3 without its head, whose states a projector reads."""
    config = qwen3(hf)
    return replace(config, lm_head=False, names=replace(config.names, other_names=r"projector\."))


class JinaReader(ListReader):
    """Scores of documents, as cosines between projected hidden states."""

    marks = ("<|embed_token|>", "<|rerank_token|>")
    most = 125
    spare = 2048

    def __init__(self, checkpoint: Checkpoint):
        if checkpoint.format == "dummy":
            message = f"{checkpoint.name} ranks with a projector that is among its weights"
            raise UnsupportedModelError(f"{message}; load the model here, without --url and --load-format dummy")
        config = Settings.of(checkpoint.config)
        hidden = config.size("hidden_size")
        if "sliding_attention" in (config.texts("layer_types", None) or ()):
            self.spare = 8192
        beside = checkpoint.file(PROJECTOR) is not None
        self._names = _BESIDE if beside else _WITHIN
        shapes = dict(zip(self._names, ((hidden // 2, hidden), (-1, hidden // 2)), strict=True))
        self._tensors = HeadTensors(checkpoint, PROJECTOR if beside else None, shapes)

    def write(self, query: Text, documents: Sequence[Text], instruction: str | None) -> list[Text]:
        # The rest of the template follows the last mark. It is left out, because no row that is read sees it.
        of_document, of_query = self.marks
        pieces: list[Text] = [_HEAD + _ASK.format(len(documents)), query, "\n"]
        if instruction:
            pieces.append(f"<instruct>\n{instruction}\n</instruct>\n")
        for number, document in enumerate(documents):
            pieces += [f'<passage id="{number}">\n', document, of_document, "\n</passage>\n"]
        return [*pieces, "<query>\n", query, of_query]

    def scores(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        vectors = [self._project(rows) for rows in prompts]
        weights = [(1.0 + _cosines(found[:-1], found[-1]).max()) / 2.0 for found in vectors]
        query = np.average([found[-1] for found in vectors], axis=0, weights=np.maximum(weights, 1e-12))
        return _cosines(np.concatenate([found[:-1] for found in vectors]), query)

    def _project(self, rows: np.ndarray) -> np.ndarray:
        first, second = (self._tensors[name] for name in self._names)
        return np.asarray(np.maximum(rows @ first.T, 0.0) @ second.T, np.float64)


def _cosines(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(query)
    return np.asarray(rows @ query / np.maximum(lengths, 1e-12), np.float64)


add_families({"JinaForRanking": jina_ranker}, model_types={}, own_code={"JinaForRanking"})
RANKERS["JinaForRanking"] = RANKERS[PROJECTOR] = JinaReader
NEEDED[JinaReader.marks[1]] = f"the projector, which is among the weights of a folder or in its {PROJECTOR}"
