"""Random configs, for hypothesis: any variants of layers that go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from prefold.model import ModelConfig, Plane, RopeConfig, mixture
from prefold.model.config import HeadNorm, Sphere

booleans = st.booleans()
ACTIVATIONS = ["silu", "gelu_tanh", "gelu", "relu", "relu2"]
HEAD_NORMS = st.builds(
    HeadNorm,
    st.sampled_from(["rms", "layer", "unit"]),
    st.sampled_from(["shared", "each", "apart", "none"]),
    after=booleans,
)


@st.composite
def configs(draw: Callable) -> ModelConfig:
    """A config of any variants that go together."""
    kv_heads, learned = draw(st.integers(1, 2)), draw(st.integers(0, 3)) == 0
    kind = draw(st.sampled_from(["", "", "sum_norms", "parallel", "row_qk_norm", "residual_scale"]))
    out_norms = kind not in ("sum_norms", "parallel") and draw(booleans)
    gated, norm = kind != "row_qk_norm" and draw(booleans), draw(st.sampled_from(["rms", "layer", "unit"]))
    values = {kind: 0.3 if kind == "residual_scale" else True} if kind else {}
    in_norms = not out_norms or draw(booleans)
    if kind not in ("sum_norms", "parallel") and draw(booleans):  # layers whose norms are in different places
        in_norms, out_norms = (True, in_norms), (out_norms, True)
    mlp, head_norms = draw(st.sampled_from(["gated", "plain"])), booleans | HEAD_NORMS
    config = ModelConfig(
        vocab_size=30, hidden=draw(st.sampled_from([6, 10])), layers=2, heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads, head_dim=4, intermediate=5, norm_eps=1e-3, rope=None if learned else RopeConfig(),
        max_positions=20, planes=(Plane(draw(st.sampled_from([None, 3]))), Plane()), norm=norm,
        norm_bias=draw(booleans), mlp=mlp, tie_embeddings=draw(booleans),
        qkv_bias=draw(booleans), qk_bias=draw(booleans), o_bias=draw(booleans), mlp_bias=draw(booleans),
        qk_norm=kind != "row_qk_norm" and draw(head_norms), in_norms=in_norms,
        out_norms=out_norms, norm_offset=float(draw(booleans)), gated=gated,
        activation=draw(st.sampled_from([*ACTIVATIONS, *(["xielu"] if mlp == "plain" else [])])),
        norm_weight=draw(booleans), embedding_norm=draw(booleans), inner_norms=draw(booleans),
        mlp_norm=draw(booleans), first_position=draw(st.sampled_from([0, 2])), lm_head_bias=draw(booleans),
        query_growth=draw(st.sampled_from([None, (0.5, 3)])),
        head_gates=draw(st.sampled_from([False, True, "each"])), gate_scale=draw(st.sampled_from([1.0, 0.7])),
        part_scales=draw(st.sampled_from([{}, {"attention": 0.7, "mlp": 1.4}])),
        rotated_dim=None if learned else draw(st.sampled_from([None, 2])),
        embedding_scale=draw(st.sampled_from([1.0, 2.5])), sinks=draw(booleans), **values,
    )  # fmt: skip
    if kind not in ("parallel", "residual_scale") and draw(st.integers(0, 3)) == 0:
        return replace(config, gate_scale=1.0, part_scales={}, sphere=Sphere(0.7, 1.3, 0.9, 0.4, 1.7))
    if config.activation not in ("silu", "gelu_tanh") or draw(booleans):
        return config
    shared, experts, groups = draw(st.sampled_from([0, 3])), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    kinds, plain = draw(st.sampled_from(["experts", (mlp, "experts")])), mlp == "plain"
    corrected, score = draw(st.sampled_from([False, True, "logits"])), draw(st.sampled_from(["softmax", "sigmoid"]))
    if groups == 1 and not corrected and draw(booleans):
        score = "sparsemixer"
    return mixture(
        config, mlp=kinds, count=groups * experts, chosen=draw(st.integers(1, experts)), normalised=draw(booleans),
        width=4, shared=shared, shared_gate=bool(shared) and draw(booleans), biases=draw(booleans),
        clamped=not plain and draw(booleans), gated=not plain, latent=draw(st.sampled_from([0, 8])),
        score=score, groups=groups, corrected=corrected, group_best=draw(st.integers(1, 2)),
        scale=draw(st.sampled_from([1.0, 2.5])), shared_scale=draw(st.sampled_from([1.0, 0.5])),
        least_sum=draw(st.sampled_from([0.0, 0.6])), tolerance=draw(st.sampled_from([0.0, 0.5])),
    )  # fmt: skip
