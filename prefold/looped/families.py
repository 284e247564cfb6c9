"""The families of looped models: functions from a Hugging Face config (a dict) to a ModelConfig. No torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..checkpoint.settings import MOST_LAYERS, Settings
from ..errors import UnsupportedModelError
from ..model.config import ModelConfig
from ..model.decoders import HFConfig, decoder, qwen_windows
from ..model.names import OURO, huginn_names
from .config import MOST_PLANES, Loop, LoopedConfig, Routing

# What Huginn's settings must say where they say anything; other values are of models that differ in more than size.
HUGINN = {
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
    "test_time_noise": 0,
}


def ouro(hf: HFConfig) -> ModelConfig:
    """Returns the config of an Ouro (LoopLM): all layers `total_ut_steps` times, each time ended by the final norm.

    The norms are those of Gemma 3. `early_exit_step` reads every row after the visit of that number, from 0.
    """
    hf = Settings.of(hf)
    visits = _visits(hf, "total_ut_steps", 4)
    step = hf.size("early_exit_step", None, least=-(2**31), most=2**31)
    if step is not None and 0 <= step < visits:
        visits = step + 1
    threshold = hf.number("early_exit_threshold", 1.0, zero=True)
    if not 0 < threshold <= 1:
        raise UnsupportedModelError(f"early_exit_threshold is {threshold}; it must be above 0 and at most 1")
    if step is not None and visits == step + 1:
        threshold = 1.0  # the step decides
    config = decoder(hf, windows=qwen_windows(hf), out_norms=True, names=OURO)
    loop = Loop(blocks=1, order=(0,) * visits, between="norm", gate=True, threshold=float(threshold))
    return LoopedConfig.of(config, loop)


def huginn(hf: HFConfig) -> ModelConfig:
    """Returns the config of a Huginn (RavenForCausalLM): a prelude, a core that is visited `mean_recurrence` times, and
    a coda. The state that the core begins with is drawn from the seed `state_seed`, 0 unless it is given."""
    hf = Settings.of(hf)
    for key, value in HUGINN.items():
        if hf.get(key) not in (None, value):
            raise UnsupportedModelError(f"{key} is {hf[key]!r}; {value!r} works")
    heads = hf.size("n_heads", None) or hf.size("num_attention_heads")
    if hf.size("num_key_value_heads", heads) != heads:
        raise UnsupportedModelError(f"num_key_value_heads is {hf['num_key_value_heads']}; it must be the {heads} heads")
    hidden = hf.size("n_embd", None) or hf.size("hidden_size")
    if hidden % heads:
        raise UnsupportedModelError(f"n_embd is {hidden}; it must be a multiple of the {heads} heads")
    most = {"least": 0, "most": MOST_LAYERS}
    prelude, coda = hf.size("n_layers_in_prelude", **most), hf.size("n_layers_in_coda", **most)
    core = hf.size("n_layers_in_recurrent_block", most=MOST_LAYERS)
    renamed: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": prelude + core + coda,
        "max_position_embeddings": hf.size("block_size"),
        "rms_norm_eps": hf.number("norm_eps", 1e-6),
        "rope_theta": hf.number("rope_base", 50000.0),
        "tie_word_embeddings": hf.flag("tie_word_embeddings", hf.flag("tie_embeddings", True)),
    }
    config = decoder(
        hf | renamed,
        kv_heads=heads,
        head_dim=hidden // heads,
        qk_bias=hf.flag("qk_bias"),
        sum_norms=True,
        embedding_scale=hidden**0.5,
        names=huginn_names(prelude, core),
    )
    return LoopedConfig.of(
        config,
        Loop(
            blocks=1,
            order=(0,) * _visits(hf, "mean_recurrence"),
            prelude=prelude,
            coda=coda,
            between="inject",
            # The deviation that weights begin with, times what embeddings are multiplied with.
            noise=(2 / (5 * hidden)) ** 0.5 * hidden**0.5,
            seed=hf.size("state_seed", 0, least=0, most=2**63),
        ),
    )


def looped(hf: HFConfig) -> ModelConfig:
    """Returns the config of a looped Llama, prefold's own family. The keys of Llama say what a layer is; the object
    `loop` has the fields of `Loop`, where `visits` may stand for `order`: the blocks in turn, so many times."""
    hf = Settings.of(hf)
    settings = hf.settings("loop")
    blocks = settings.size("blocks", least=-MOST_LAYERS, most=MOST_LAYERS)
    order = settings.get("order")
    if order is None:
        order = [visit % max(1, blocks) for visit in range(_visits(settings, "visits"))]
    elif not isinstance(order, list) or not all(type(block) is int for block in order):
        raise settings.wrong("order", "a list of numbers of blocks")
    most = {"least": 0, "most": MOST_LAYERS}
    try:
        loop = Loop(
            blocks=blocks,
            order=tuple(order),
            prelude=settings.size("prelude", 0, **most),
            coda=settings.size("coda", 0, **most),
            between=settings.text("between", "nothing"),
            noise=settings.number("noise", 0.0, zero=True),
            seed=settings.size("seed", 0, least=0, most=2**63),
            gate=settings.flag("gate"),
            gate_reads=settings.text("gate_reads", "state"),
            router=_router(settings),
            threshold=float(settings.number("threshold", 1.0, zero=True)),
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"loop.{error}") from None
    return LoopedConfig.of(decoder(hf), loop)


def _router(settings: Settings) -> Routing | None:
    """Returns who picks blocks, by the object `router`; its kind alone may stand for it."""
    given = settings.get("router")
    if given is None:
        return None
    values = Settings({"kind": given}, settings.file, f"{settings.prefix}router.")
    values = values if isinstance(given, str) else settings.settings("router")
    if unknown := sorted(set(values) - {field.name for field in fields(Routing)}):
        raise UnsupportedModelError(f"router.{unknown[0]} is unknown")
    try:
        return Routing(
            kind=values.text("kind", "hard"),
            reads=values.text("reads", "request"),
            threshold=float(values.number("threshold", 0.5, zero=True)),
            top=values.size("top", 1, least=0),
            planner=values.flag("planner"),
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"router.{error}") from None


def _visits(hf: Settings, key: str, default: int | None = None) -> int:
    visits = hf.size(key, *([] if default is None else [default]), least=-MOST_PLANES, most=MOST_PLANES)
    if visits < 1:
        raise UnsupportedModelError(f"{hf.prefix}{key} is {visits}; a pass makes at least one visit")
    return visits
