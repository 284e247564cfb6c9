"""Shared prefixes in a Hugging Face model: an attention implementation, and inputs that are rows.

    share(model)                                           # attn_implementation "prefold"
    batch = TrainBatch.build(config_of(model), sequences, prompt_lengths=...)
    loss = sft_loss(logprobs(model, batch))                # or: model(**folded_inputs(model, batch)), `from_logits`
    loss.backward()

The model sees one sequence of rows with positions. Which row sees which, the attention learns from an argument that
`folded_inputs` adds. Without that argument (in `generate`, or for a padded batch) it is transformers' own sdpa
attention. It works with transformers' gradient checkpointing, and with every sharing mode.

Dropout would fall on a shared row once, where each of the sequences would have its own. Attention dropout is therefore
refused; set any other dropout to 0 as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, MissingExtraError, UnsupportedModelError
from ..model import ModelConfig, config_from
from ..spec.requests import Sharing
from ..worker.torch.rows import Path, StepAttend
from .batch import TrainBatch, dtype_on
from .losses import target_logprobs

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise MissingExtraError("transformers", "train", "training a Hugging Face model") from error

# The name of the attention implementation.
NAME = "prefold"
LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def share(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the model the attention that knows of rows, and returns the model.

    Once this module is imported, from_pretrained(..., attn_implementation="prefold") does the same.
    """
    model.set_attn_implementation(NAME)
    return model


def config_of(model: PreTrainedModel) -> ModelConfig:
    """Returns the model's config as `TrainBatch.build` takes it.

    Raises UnsupportedModelError for an unknown family, and for a looped one: its modules do not say which visit they
    attend in.
    """
    config = config_from(model.config.to_dict())
    if config.loading:
        raise UnsupportedModelError(f"training needs a family of prefold's own, and {type(model).__name__} has none")
    if config.model != ModelConfig.model:
        raise UnsupportedModelError("the model is looped; train it as one of prefold's own models (prefold.train)")
    return config


def folded_inputs(model: PreTrainedModel, batch: TrainBatch) -> dict[str, Any]:
    """Returns arguments for the model's forward: input_ids and position_ids, int64 [1, rows], and what attention needs.

    The model then returns results of rows: hidden states [1, rows, hidden], logits [1, rows, vocabulary]; with
    logits_to_keep=torch.from_numpy(batch.step.read_rows) logits of the rows that are read. `from_logits` reads them.
    Raises InputError for a model without this attention (see `share`).
    """
    if model.config._attn_implementation != NAME:
        raise InputError(
            f"the model's attention is {model.config._attn_implementation!r}, which does not know of rows",
            field="model",
            remedy="call share(model) first",
        )
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    return {
        "input_ids": prepared.tokens[None],
        "position_ids": prepared.positions[None],
        # Models pass a mask of four dimensions on as it is, and make none of their own.
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=model.device),
        "use_cache": False,
        "prefold": batch,
    }


def logprobs(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Returns log p(target | what comes before it) of all targets, in order of the sequences: float32 [targets].

    The logits are never whole in memory. This calls the model's decoder, not the model: where the call of a wrapper
    matters (DistributedDataParallel, FSDP), call the wrapper with `folded_inputs` and use `from_logits`.
    Raises UnsupportedModelError for a model whose logits are not a plain product with the LM head's weight.
    """
    head = model.get_output_embeddings()
    strange = [name for name in LOGITS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if strange or type(head) is not torch.nn.Linear or head.bias is not None:
        problem = f"has {strange[0]}" if strange else "has an LM head that is no plain linear"
        raise UnsupportedModelError(f"the model {problem}; compute its logits and use `from_logits`")
    hidden = model.get_decoder()(**folded_inputs(model, batch)).last_hidden_state[0]
    read = batch.prepared(model.device, dtype_on(model.device, model.dtype)).read_rows
    return target_logprobs(hidden.index_select(0, read), head.weight, batch.target_reads, batch.target_ids)


def from_logits(logits: Tensor, batch: TrainBatch) -> Tensor:
    """Returns the log-probabilities of all targets, as `logprobs` does, from logits [1, rows, vocabulary].

    The rows are all rows of the batch, or those that are read.
    """
    logits = logits[0].float()
    reads = batch.target_reads if len(logits) == len(batch.step.read_rows) else batch.step.read_rows[batch.target_reads]
    at, ids = (torch.from_numpy(x).to(logits.device) for x in (reads, batch.target_ids))
    return logits[at, ids] - logits.logsumexp(-1)[at]


def completion_logprobs(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *, sharing: Sharing = "full"
) -> Tensor:
    """Returns the log-probabilities of completions in a padded batch, float32 [batch, logits_to_keep], as TRL's
    trainers ask for them. Places of padding have 0.

    input_ids, attention_mask  int64 [batch, length], padded on any side; the last `logits_to_keep` places of each row
                               are the completion and its padding
    """
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    is_target = mask.copy()
    is_target[:, : ids.shape[1] - logits_to_keep] = False
    is_target &= np.cumsum(mask, 1) > 1  # not a sequence's first token
    rows = np.flatnonzero(is_target.any(1)).tolist()
    masks = [is_target[i][mask[i]] for i in rows]
    batch = TrainBatch.build(config_of(model), [ids[i][mask[i]] for i in rows], masks=masks, sharing=sharing)
    is_read = torch.from_numpy(is_target[:, ids.shape[1] - logits_to_keep :]).to(model.device)
    values = logprobs(model, batch)
    return values.new_zeros(is_read.shape).masked_scatter(is_read, values)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    prefold: TrainBatch | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of query [1, heads, rows, dim] over key and value [1, kv_heads, rows, dim], as
    transformers' models call it: [1, rows, heads, dim]."""
    sinks = options.get("s_aux")
    if prefold is None:
        if sinks is not None:
            raise UnsupportedModelError("attention with sinks runs over rows alone; pass `folded_inputs`")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if dropout:
        raise InputError(
            "attention dropout would be different for sequences that share a row",
            field="model",
            remedy="set attention_dropout (GPT-2: attn_pdrop) to 0",
        )
    # Under autocast the rotary embedding gives queries and keys in float32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = StepAttend(prefold.prepared(q.device, q.dtype), Path(), prefold.config.planes, scale)
    return attend(module.layer_idx, q, k, v, sinks)[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
