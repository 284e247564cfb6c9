"""Load a transformers model and its adapters. A model is accepted if its rows and whole prompts give equal results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...checkpoint import Checkpoint
from ...errors import CheckpointError, InputError, UnsupportedModelError
from ...model.adapter_config import read_adapter_config
from ...model.adapters import TENSOR, AdapterArrays, LinearAdapter, Pair, adapter_file, scaled
from ...model.sources import SafetensorsSource
from ...worker.torch.device import check_fits
from ...worker.torch.lora import Adapter
from ...worker.torch.parallel import ALONE, Alone
from .check import check, expected_of, note, refused
from .config import TransformersConfig, transformers_config
from .fused import fuse, rotate_by_kernels
from .model import PASSES, RowLinear, RowPass, TransformersLM

# Tensors of towers, and of the layers that join them to the text model.
TOWERS = re.compile(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\.")


def load_model(
    checkpoint: Checkpoint,
    config: TransformersConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    pack: bool = True,
    seed: int = 0,
    ranks: Alone = ALONE,
) -> TransformersLM:
    """Return the checkpoint's model in evaluation mode. Arguments and errors are as in `prefold.model.load_model`.

    Raise UnsupportedModelError, with the reason, if its modules do not treat rows independently.
    """
    if ranks.size > 1:
        raise InputError(
            f"tensor_parallel is {ranks.size}, but transformers' modules, which compute this model, cannot be split",
            field="tensor_parallel",
            remedy="leave it out",
        )
    device = torch.device(device)
    whole = _whole(checkpoint, config, dtype, device, seed).eval().requires_grad_(False)
    name, decoder = _decoder(whole, config)
    weights = sum(parameter.numel() for parameter in whole.parameters())
    rows = RowPass()
    PASSES.update(dict.fromkeys(whole.modules(), rows))
    model = TransformersLM(config, whole, decoder, rows)
    with _quiet(), torch.no_grad():  # a slice of an inference tensor has no `_base`, which the mask code needs
        expected, most = expected_of(model)
        noted = note(model)
    with torch.no_grad():
        linears = _replace_linears(model, packed=pack)
    with torch.inference_mode():
        rotate_by_kernels(decoder)
    model.settle(replace(noted, linears=linears, weights=weights))
    if config.num_labels:
        model.take_score(whole.score)
    model.may_pack = pack
    if config.lm_head:
        model.take_head(name)
    with _quiet(), torch.inference_mode():
        check(model, expected, most)
    return model.eval()


def _whole(
    checkpoint: Checkpoint, config: TransformersConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> Any:
    """Return the model as transformers loads it, with its own attention."""
    loader = getattr(transformers, config.loader)
    settings = transformers_config(config.settings, config.architecture)
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    more = {"key_mapping": {r"^model\.language_model\.": "model."}} if config.is_part else {}
    with _quiet():
        try:
            with torch.device("meta"):
                empty = loader.from_config(settings, **arguments)
            size = sum(parameter.numel() for parameter in empty.parameters()) * dtype.itemsize
            check_fits(size, device, checkpoint.name, "use a smaller model, or more memory")
            if checkpoint.format == "dummy":
                with torch.random.fork_rng([]):
                    torch.manual_seed(seed)
                    return loader.from_config(settings, **arguments).to(device)
            for _ in SafetensorsSource.opened(checkpoint):  # raises a clear error if the files are damaged
                pass
            whole, info = loader.from_pretrained(
                checkpoint.path, config=settings, use_safetensors=True, trust_remote_code=False,
                local_files_only=True, output_loading_info=True, **arguments, **more,
            )  # fmt: skip
        except (ImportError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} cannot load {checkpoint.name}: {cause}"
            ) from error
    if config.is_part:
        info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not TOWERS.match(name)}
    problems = [
        f"{kind.removesuffix('_keys')}: {', '.join(map(str, sorted(info[kind], key=str)[:8]))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[kind]
    ]
    if problems:
        raise CheckpointError(f"the tensors of {checkpoint.name} do not fit its config; {'; '.join(problems)}")
    return whole.to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers."""
    logging = transformers.utils.logging
    before, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if progress:
            logging.enable_progress_bar()


def _decoder(whole: Any, config: TransformersConfig) -> tuple[str, nn.Module]:
    """Return (its name in the model, the module that computes hidden states). The name is "" for the whole model."""
    if config.loader == "AutoModel":
        return "", whole.get_decoder()
    for module in (whole.get_decoder(), whole.base_model, getattr(whole, "model", None)):
        if isinstance(module, transformers.PreTrainedModel) and module is not whole:
            return next(name for name, other in whole.named_modules() if other is module), module
    raise refused(config, "no single module computes its hidden states")


def _replace_linears(model: TransformersLM, *, packed: bool) -> dict[str, tuple[int, int]]:
    """Replace each linear of the decoder by a RowLinear. Return {name: (inputs, outputs)}."""
    prefix = next(name for name, module in model.whole.named_modules() if module is model.decoder)
    linears = dict(fuse(model.decoder, prefix, model.rows, packed=packed))
    for path, module in list(model.decoder.named_modules()):
        kind = type(module)
        if kind not in (nn.Linear, Conv1D):
            continue
        name = f"{prefix}.{path}" if prefix else path
        weight = module.weight if kind is nn.Linear else module.weight.T.contiguous()
        linear = RowLinear(name, weight, module.bias, model.rows, packed=packed)
        model.decoder.set_submodule(path, linear)
        linears[name] = linear.in_features, linear.out_features
    return linears


def load_adapter(
    path: str | Path,
    config: TransformersConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    name: str | None = None,
    ranks: Alone = ALONE,
) -> Adapter:
    """Return the adapter of a PEFT folder, with transformers' names of the linears.

    Arguments and errors are as in `prefold.model.load_adapter`.
    """
    folder = Path(path).expanduser()
    settings = read_adapter_config(folder)
    pairs: dict[str, Pair] = {}
    file = adapter_file(folder)
    for stored in file.tensors:
        match = TENSOR.fullmatch(stored)
        module = match[1] if match else stored
        places = [linear for linear in config.linears if linear == module or linear.endswith(f".{module}")]
        if match is None or len(places) != 1:
            raise UnsupportedModelError(
                f"{folder} adapts {module}, which is not a linear of the model that sees every row"
            )
        setattr(pairs.setdefault(places[0], Pair(module)), match[2].lower(), file.array(stored))
    if not pairs:
        raise CheckpointError(f"{folder} adapts nothing")
    linears = {}
    for module, pair in pairs.items():
        inputs, outputs = config.linears[module]
        a, b = scaled(pair, settings, outputs, inputs, folder)
        linears[module] = LinearAdapter.joined([(a, b, slice(0, outputs))])
    return Adapter.of(AdapterArrays(name or str(path), (linears,)), dtype, torch.device(device))
