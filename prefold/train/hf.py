"""Shared prefixes in a Hugging Face model: an attention implementation, and inputs that are rows.

    share(model)                                           # attn_implementation "prefold"
    batch = TrainBatch.build(config_of(model), sequences, prompt_lengths=...)
    loss = sft_loss(logprobs(model, batch))                # or: model(**folded_inputs(model, batch)), `from_logits`
    loss.backward()

The model gets one sequence of rows with positions. `folded_inputs` adds an argument with the visibility of rows for the
attention. Without this argument (in `generate`, or for a padded batch), the attention is transformers' own sdpa
attention. Gradient checkpointing of transformers and every sharing mode work.

Dropout would be the same for all sequences that share a row. Attention dropout is therefore rejected; set any other
dropout to 0 as well.
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

# The name of the attention implementation in transformers.
NAME = "prefold"
LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def share(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a model to prefold's attention.

    After importing this module, `from_pretrained(..., attn_implementation="prefold")` does the same.

    Args:
        model: The model; it is modified.

    Returns:
        The model.

    Example:
        >>> model = share(AutoModelForCausalLM.from_pretrained("out"))
    """
    model.set_attn_implementation(NAME)
    return model


def config_of(model: PreTrainedModel) -> ModelConfig:
    """Return a model's config, as `TrainBatch.build` needs it.

    Args:
        model: The model.

    Returns:
        The config.

    Raises:
        UnsupportedModelError: prefold lacks the family; or the model is looped, and its modules do not tell the
            attention which visit they belong to.

    Example:
        >>> batch = TrainBatch.build(config_of(model), sequences, prompt_lengths=lengths)
    """
    config = config_from(model.config.to_dict())
    if config.loading:
        raise UnsupportedModelError(f"training supports only prefold's own families, not {type(model).__name__}")
    if config.model != ModelConfig.model:
        raise UnsupportedModelError("the model is looped; load it with prefold.train.load_model to train it")
    return config


def folded_inputs(model: PreTrainedModel, batch: TrainBatch) -> dict[str, Any]:
    """Return the arguments of the model's forward call for a batch.

    The model then returns results by row: hidden states [1, rows, hidden], logits [1, rows, vocabulary]. Add
    `logits_to_keep=torch.from_numpy(batch.step.read_rows)` to compute logits of read rows only. `from_logits` reads
    both.

    Args:
        model: The model, after `share`.
        batch: The batch.

    Returns:
        `input_ids` and `position_ids`, int64 [1, rows], and the arguments for the attention.

    Raises:
        InputError: The model does not use prefold's attention; call `share` first.

    Example:
        >>> logits = model(**folded_inputs(model, batch)).logits
        >>> loss = sft_loss(from_logits(logits, batch))
    """
    if model.config._attn_implementation != NAME:
        raise InputError(
            f"the model's attention is {model.config._attn_implementation!r}, which does not support rows",
            field="model",
            remedy="call share(model) first",
        )
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    return {
        "input_ids": prepared.tokens[None],
        "position_ids": prepared.positions[None],
        # Models pass a four-dimensional mask through unchanged, and make no mask of their own.
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=model.device),
        "use_cache": False,
        "prefold": batch,
    }


def logprobs(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Return log p(target | tokens before it) of all targets, with gradients.

    The logits are never in memory as a whole. This function calls the model's decoder directly. If a wrapper must be
    called (DistributedDataParallel, FSDP), call it with `folded_inputs`, and use `from_logits`.

    Args:
        model: The model, after `share`.
        batch: The batch.

    Returns:
        float32 [targets], sequence by sequence.

    Raises:
        InputError: The model does not use prefold's attention; call `share` first.
        UnsupportedModelError: Logits are not a plain product with the LM head's weight.

    Example:
        >>> loss = sft_loss(logprobs(model, batch))
    """
    head = model.get_output_embeddings()
    strange = [name for name in LOGITS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if strange or type(head) is not torch.nn.Linear or head.bias is not None:
        problem = f"has {strange[0]}" if strange else "has an LM head that is not a plain linear"
        raise UnsupportedModelError(f"the model {problem}; compute its logits and use `from_logits`")
    hidden = model.get_decoder()(**folded_inputs(model, batch)).last_hidden_state[0]
    read = batch.prepared(model.device, dtype_on(model.device, model.dtype)).read_rows
    return target_logprobs(hidden.index_select(0, read), head.weight, batch.target_reads, batch.target_ids)


def from_logits(logits: Tensor, batch: TrainBatch) -> Tensor:
    """Return log p(target | tokens before it) of all targets, from logits.

    Args:
        logits: [1, rows, vocabulary], of all rows of the batch or of its read rows.
        batch: The batch.

    Returns:
        float32 [targets], sequence by sequence.

    Example:
        >>> values = from_logits(model(**folded_inputs(model, batch)).logits, batch)
    """
    logits = logits[0].float()
    reads = batch.target_reads if len(logits) == len(batch.step.read_rows) else batch.step.read_rows[batch.target_reads]
    at, ids = (torch.from_numpy(x).to(logits.device) for x in (reads, batch.target_ids))
    return logits[at, ids] - logits.logsumexp(-1)[at]


def completion_logprobs(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *, sharing: Sharing = "full"
) -> Tensor:
    """Return the log-probabilities of completions in a padded batch, in the form of TRL's trainers.

    Args:
        model: The model, after `share`.
        input_ids: int64 [batch, length], padded on any side.
        attention_mask: int64 [batch, length], 0 for padding.
        logits_to_keep: Number of final columns that have the completions and their padding.
        sharing: As in `TrainBatch`.

    Returns:
        float32 [batch, logits_to_keep], 0 for padding.

    Raises:
        InputError: As in `logprobs`.
        UnsupportedModelError: As in `logprobs` and `config_of`.

    Example:
        >>> values = completion_logprobs(model, input_ids, attention_mask, logits_to_keep=completion_ids.shape[1])
    """
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    is_target = mask.copy()
    is_target[:, : ids.shape[1] - logits_to_keep] = False
    is_target &= np.cumsum(mask, 1) > 1  # the first token of a sequence cannot be a target
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
    """Compute attention with the signature of transformers, with the rows of a TrainBatch in `prefold`.

    The query is [1, heads, rows, dim], the key and the value are [1, kv_heads, rows, dim], and the result is
    [1, rows, heads, dim].
    """
    sinks = options.get("s_aux")
    if prefold is None:
        if sinks is not None:
            raise UnsupportedModelError("attention with sinks runs only over rows; pass the result of `folded_inputs`")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if dropout:
        raise InputError(
            "attention dropout does not work with shared rows",
            field="model",
            remedy="set attention_dropout (GPT-2: attn_pdrop) to 0",
        )
    # Under autocast, the rotary embedding returns float32 queries and keys.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = StepAttend(prefold.prepared(q.device, q.dtype), Path(), prefold.config.planes, scale)
    return attend(module.layer_idx, q, k, v, sinks)[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
