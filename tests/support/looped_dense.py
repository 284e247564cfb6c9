"""Small random checkpoints of looped models, and what they compute, written down as their definitions have it.

Nothing here uses prefold's layers. `dense` reads the tensors by the family's own names, and attends densely.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import write_tokenizer
from torch import Tensor
from torch.nn.functional import linear, silu

OURO: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"},
    "vocab_size": 307,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 6,
    "intermediate_size": 50,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "eos_token_id": 2,
}
HUGINN: dict[str, Any] = {
    "architectures": ["RavenForCausalLM"],
    "model_type": "huginn_raven",
    "auto_map": {"AutoModelForCausalLM": "raven_modeling_minimal.RavenForCausalLM"},
    "block_class_name": "SandwichBlock",
    "injection_type": "linear",
    "state_init": "like-init",
    "test_time_noise": 0,
    "vocab_size": 307,
    "n_embd": 36,
    "n_heads": 6,
    "n_layers": 6,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 1,
    "mean_recurrence": 3,
    "intermediate_size": 50,
    "norm_eps": 1e-6,
    "rope_base": 1000,
    "block_size": 512,
    "qk_bias": True,
    "tie_embeddings": True,
    "eos_token_id": 2,
}
LOOPED: dict[str, Any] = {
    "architectures": ["PrefoldLoopedForCausalLM"],
    "model_type": "prefold_looped",
    "vocab_size": 307,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 50,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "loop": {"blocks": 2, "order": [0, 1, 1, 0, 1]},
    "eos_token_id": 2,
}
LOOPS: dict[str, dict[str, Any]] = {"ouro": OURO, "huginn": HUGINN, "looped": LOOPED}
_numbers = itertools.count()


def looped_checkpoint(tmp_path: Path, family: str, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """A folder under `tmp_path` with a random checkpoint of "ouro", "huginn" or "looped"; overrides: of its config."""
    config = LOOPS[family] | overrides
    generator = torch.Generator().manual_seed(seed)
    folder = Path(tmp_path) / f"{family}-{next(_numbers)}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: _random(name, shape, generator) for name, shape in _shapes(family, config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def looped_adapter(folder: Path, place: Path, *, seed: int = 3) -> dict[str, Tensor]:
    """Writes a random LoRA adapter of a checkpoint to `place`, and returns the checkpoint's tensors merged with it."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    adapter, merged = {}, dict(tensors)
    for name, weight in tensors.items():
        if weight.ndim == 2 and (".attn." in name or ".mlp." in name or "_proj." in name):
            path = name.removesuffix(".weight")
            a, b = (torch.randn(shape, generator=generator) / 3 for shape in ((2, weight.shape[1]), (len(weight), 2)))
            adapter |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
            merged[name] = weight + 1.5 * b @ a
    place.mkdir()
    save_file(adapter, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 3}))
    return merged


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith("ln_f.weight"):
        return 1 + 0.2 * values
    if len(shape) != 2:
        return 0.3 * values
    # Where the residual stream is normed after every sum, larger weights would make rounding grow from visit to visit.
    return (0.8 if name.startswith("transformer.") and ".wte." not in name else 1.5) * values / shape[1] ** 0.5


def _shapes(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if family == "huginn":
        hidden, width, vocab = config["n_embd"], config["intermediate_size"], config["vocab_size"]
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (vocab, hidden),
            "transformer.adapter.weight": (hidden, 2 * hidden),
            "transformer.ln_f.weight": (hidden,),
            "freqs_cis": (1, config["block_size"], 1, hidden // config["n_heads"] // 2, 2),
        }
        if not config["tie_embeddings"]:
            shapes["lm_head.weight"] = (vocab, hidden)
        counts = {"prelude": "n_layers_in_prelude", "core_block": "n_layers_in_recurrent_block"}
        for part, key in (counts | {"coda": "n_layers_in_coda"}).items():
            for number in range(config[key]):
                layer = f"transformer.{part}.{number}."
                shapes |= {f"{layer}norm_{i}.weight": (hidden,) for i in (1, 2, 3, 4)}
                shapes |= {
                    layer + "attn.Wqkv.weight": (3 * hidden, hidden),
                    layer + "attn.proj.weight": (hidden, hidden),
                    layer + "mlp.fc.weight": (2 * width, hidden),
                    layer + "mlp.proj.weight": (hidden, width),
                }
                if config["qk_bias"]:
                    shapes[layer + "attn.qk_bias"] = (2, 1, config["n_heads"], hidden // config["n_heads"])
        return shapes
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    if family == "ouro":
        shapes |= {"model.early_exit_gate.weight": (1, hidden), "model.early_exit_gate.bias": (1,)}
    elif config["loop"].get("gate"):
        inputs = 4 if config["loop"].get("gate_reads") == "features" else hidden
        shapes |= {"model.gate.weight": (1, inputs), "model.gate.bias": (1,)}
    if family == "looped" and (router := config["loop"].get("router")):
        visits, choices = len(config["loop"]["order"]), config["loop"]["blocks"] + 1
        parts = {"router": (hidden if router.get("reads") == "row" else 2 * hidden, choices)}
        if router.get("planner"):
            parts["planner"] = (2 * hidden, visits * choices)
        for name, (inputs, outputs) in parts.items():
            shapes |= {f"model.{name}.inner.weight": (hidden, inputs), f"model.{name}.inner.bias": (hidden,)}
            shapes |= {f"model.{name}.outer.weight": (outputs, hidden), f"model.{name}.outer.bias": (outputs,)}
        shapes["model.router.step"] = (visits, hidden)
    if family == "looped" and config["loop"].get("between") == "inject":
        shapes["model.inject.weight"] = (hidden, 2 * hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family == "ouro":
            norms += ["input_layernorm_2", "post_attention_layernorm_2"]
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in norms}
        shapes |= {
            layer + "self_attn.q_proj.weight": (hidden, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, hidden),
            layer + "mlp.gate_proj.weight": (width, hidden),
            layer + "mlp.up_proj.weight": (width, hidden),
            layer + "mlp.down_proj.weight": (hidden, width),
        }
    return shapes


class Dense:
    """What a checkpoint of a looped model computes for one sequence.

    tensors  by the names of the file; they may be given, to ask for gradients
    """

    def __init__(self, folder: Path, tensors: dict[str, Tensor] | None = None):
        self.config = json.loads((folder / "config.json").read_text())
        self.t = tensors or load_file(folder / "model.safetensors")
        self.family = next(name for name, one in LOOPS.items() if one["model_type"] == self.config["model_type"])

    def hidden(self, tokens: list[int]) -> Tensor:
        """[tokens, hidden] after the last norm."""
        return self.visits(tokens)[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        if "lm_head.weight" in self.t:
            return linear(hidden, self.t["lm_head.weight"])
        names = ("transformer.wte.weight", "model.embed_tokens.weight")
        return linear(hidden, next(self.t[name] for name in names if name in self.t))

    def visits(self, tokens: list[int]) -> list[Tensor]:
        """Hidden states as they would be read after each visit; of Huginn only those after the last one."""
        return {"ouro": self._ouro, "huginn": self._huginn, "looped": self._looped}[self.family](torch.tensor(tokens))

    def routed(self, tokens: list[int], **routing: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Of one sequence: states as they are read after each visit, and the weights of the blocks and of staying, a
        row each ([rows, blocks + 1]). routing: in place of the config's."""
        c = self.config
        loop = c["loop"]
        routing = {"kind": "hard", "reads": "request", "threshold": 0.5, "top": 1} | loop["router"] | routing
        blocks, visits, rows = loop["blocks"], len(loop["order"]), len(tokens)
        prelude, size = loop.get("prelude", 0), (c["num_hidden_layers"] - loop.get("prelude", 0)) // loop["blocks"]
        x = self.t["model.embed_tokens.weight"][torch.tensor(tokens)]
        for number in range(prelude):
            x = self._layer(x, f"model.layers.{number}.")
        given, injects = x, loop.get("between") == "inject"
        if injects:
            x = state_noise(loop.get("seed", 0), *given.shape) * loop.get("noise", 0.0)
        by_row = routing["reads"] == "row"
        here, states, weights = torch.ones(rows), [], []
        keys: dict[tuple[str, int], Tensor] = {}  # by layer and row: the state that its last keys there are made of
        plan = (
            self._ask("planner", self._read(x, False)).view(1, visits, blocks + 1) if routing.get("planner") else None
        )
        for visit in range(visits):
            if routing["kind"] == "planned":
                logits = plan[:, visit]
            else:
                logits = self._ask("router", self._read(x, by_row), visit)
            shares = []
            for one in logits:
                if visit == 0:
                    one = torch.cat((one[:-1], torch.tensor([-torch.inf])))
                p = one.softmax(-1)
                if routing["kind"] == "soft":
                    shares.append(p)
                elif p[-1] >= routing["threshold"]:
                    shares.append(torch.eye(blocks + 1)[blocks])
                else:
                    best = sorted(range(blocks), key=lambda b: -float(one[b]))
                    best = best[: routing["top"] if routing["kind"] == "top" else 1]
                    share = torch.zeros(blocks + 1)
                    share[best] = one[best].softmax(-1)
                    shares.append(share)
            share = torch.stack(shares).expand(rows, -1)
            weight = share[:, :-1] * here[:, None]
            here = here * (1 - share[:, -1])
            weights.append(torch.cat((weight, 1 - weight.sum(1, keepdim=True)), 1))
            after = x * weights[-1][:, -1:]
            came = linear(torch.cat((x, given), -1), self.t["model.inject.weight"]) if injects else x
            if loop.get("between") == "add":
                came = self.norm(x, "model.norm") + self.norm(given, "model.norm")
            for block in range(blocks):
                there = weight[:, block] > 0
                out = came
                for place in range(size):
                    name = f"model.layers.{prelude + block * size + place}."
                    if by_row and routing["kind"] != "soft":
                        for row in range(rows):
                            if there[row]:
                                keys[name, row] = out[row]
                        seen = torch.stack([keys.get((name, row), came[row]) for row in range(rows)])
                        out = self._layer(out, name, seen)
                    else:
                        out = self._layer(out, name)
                if loop.get("between") == "norm":
                    out = self.norm(out, "model.norm")
                after = after + weight[:, block : block + 1] * out
            x = after
            states.append(self._as_read(x, loop.get("between")))
        return states, weights

    def _read(self, x: Tensor, by_row: bool) -> Tensor:
        parts = [x] if by_row else [x.mean(0, keepdim=True), x[-1:]]
        return torch.cat([part / (part.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() for part in parts], -1)

    def _ask(self, name: str, read: Tensor, visit: int | None = None) -> Tensor:
        inner = linear(read, self.t[f"model.{name}.inner.weight"], self.t[f"model.{name}.inner.bias"])
        if visit is not None:
            inner = inner + self.t["model.router.step"][visit]
        return linear(silu(inner), self.t[f"model.{name}.outer.weight"], self.t[f"model.{name}.outer.bias"])

    def _layer(self, x: Tensor, name: str, seen: Tensor | None = None) -> Tensor:
        """seen: the states that keys and values are made of; by default x."""
        x = x + self._llama_attention(x, name, seen)
        return x + self.llama_mlp(x, name)

    def leaving(self, states: list[Tensor]) -> Tensor:
        """The probability of each token to leave after each visit, [visits, tokens], by the gate."""
        name = "model.early_exit_gate" if self.family == "ouro" else "model.gate"
        left, found = torch.ones(len(states[0])), []
        for number, state in enumerate(states):
            read = state
            if self.config.get("loop", {}).get("gate_reads") == "features":
                read = self.features(states[: number + 1])
            share = torch.sigmoid(linear(read, self.t[name + ".weight"], self.t[name + ".bias"])[:, 0])
            found.append(left if number == len(states) - 1 else share * left)
            left = left * (1 - share)
        return torch.stack(found)

    def features(self, states: list[Tensor]) -> Tensor:
        """The four features of the last of these states, a row at a time."""
        found = []
        for row in range(len(states[-1])):
            p = self.logits(states[-1][row]).softmax(-1)
            entropy = float(-(p * p.log()).sum()) / math.log(len(p))
            same = cosine = 0.0
            if len(states) > 1:
                now, before = states[-1][row], states[-2][row]
                same = float(p.argmax() == self.logits(before).argmax())
                cosine = float(now @ before / (now.norm() * before.norm()))
            found.append([float(p.max()), same, entropy, cosine])
        return torch.tensor(found)

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config.get("rms_norm_eps", self.config.get("norm_eps"))
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.t[name + ".weight"]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [tokens, heads, dim] -> [tokens, heads * dim]"""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        seen = torch.ones(len(q), len(q)).tril().bool()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)

    def angles(self, rows: int, dim: int) -> Tensor:
        base = self.config.get("rope_theta", self.config.get("rope_base"))
        return torch.arange(rows)[:, None, None] * base ** (-torch.arange(0, dim, 2) / dim)

    def _ouro(self, tokens: Tensor) -> list[Tensor]:
        x, states = self.t["model.embed_tokens.weight"][tokens], []
        for _ in range(self.config["total_ut_steps"]):
            for number in range(self.config["num_hidden_layers"]):
                name = f"model.layers.{number}."
                x = x + self.norm(self._llama_attention(x, name), name + "input_layernorm_2")
                x = x + self.norm(self.llama_mlp(x, name), name + "post_attention_layernorm_2")
            x = self.norm(x, "model.norm")
            states.append(x)
        return states

    def _looped(self, tokens: Tensor) -> list[Tensor]:
        x, loop = self.t["model.embed_tokens.weight"][tokens], self.config["loop"]
        between, last = loop.get("between", "nothing"), self.config["num_hidden_layers"]
        prelude, coda = loop.get("prelude", 0), loop.get("coda", 0)
        size = (last - prelude - coda) // loop["blocks"]

        def through(x: Tensor, layers: range) -> Tensor:
            for number in layers:
                name = f"model.layers.{number}."
                x = x + self._llama_attention(x, name)
                x = x + self.llama_mlp(x, name)
            return x

        given, states = through(x, range(prelude)), []
        x = state_noise(loop.get("seed", 0), *given.shape) * loop.get("noise", 0.0) if between == "inject" else given
        for block in loop["order"]:
            if between == "inject":
                x = linear(torch.cat((x, given), -1), self.t["model.inject.weight"])
            if between == "add":
                x = self.norm(x, "model.norm") + self.norm(given, "model.norm")
            x = through(x, range(prelude + block * size, prelude + (block + 1) * size))
            if between == "norm":
                x = self.norm(x, "model.norm")
            if coda:
                ends = self.norm(x, "model.norm") if between == "inject" else x
                states.append(self.norm(through(ends, range(last - coda, last)), "model.norm"))
            else:
                states.append(self._as_read(x, between))
        return states

    def _as_read(self, x: Tensor, between: str | None) -> Tensor:
        """A state as it is read after any visit where there is no coda."""
        if between == "norm":
            return x
        return self.norm(self.norm(x, "model.norm") if between == "inject" else x, "model.norm")

    def _llama_attention(self, x: Tensor, layer: str, seen: Tensor | None = None) -> Tensor:
        h, heads = self.norm(x, layer + "input_layernorm"), self.config["num_attention_heads"]
        of = {"q": h, "k": h, "v": h}
        if seen is not None:
            of["k"] = of["v"] = self.norm(seen, layer + "input_layernorm")
        dim = x.shape[1] // heads
        q, k, v = (linear(of[n], self.t[f"{layer}self_attn.{n}_proj.weight"]).unflatten(1, (-1, dim)) for n in "qkv")
        angles = self.angles(len(x), dim)

        def turned(x: Tensor) -> Tensor:  # the halves of a head against each other
            a, b = x[..., : dim // 2], x[..., dim // 2 :]
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        return linear(self._attend(turned(q), turned(k), v), self.t[layer + "self_attn.o_proj.weight"])

    def llama_mlp(self, x: Tensor, layer: str) -> Tensor:
        h = self.norm(x, layer + "post_attention_layernorm")
        gate, up = (linear(h, self.t[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return linear(silu(gate) * up, self.t[layer + "mlp.down_proj.weight"])

    def _huginn(self, tokens: Tensor) -> list[Tensor]:
        c = self.config
        given = self.t["transformer.wte.weight"][tokens] * math.sqrt(c["n_embd"])
        for number in range(c["n_layers_in_prelude"]):
            given = self._sandwich(given, f"transformer.prelude.{number}.")
        deviation = math.sqrt(2 / (5 * c["n_embd"])) * math.sqrt(c["n_embd"])
        x = state_noise(c.get("state_seed", 0), len(tokens), c["n_embd"]) * deviation
        for _ in range(c["mean_recurrence"]):
            x = linear(torch.cat((x, given), -1), self.t["transformer.adapter.weight"])
            for number in range(c["n_layers_in_recurrent_block"]):
                x = self._sandwich(x, f"transformer.core_block.{number}.")
        x = self.norm(x, "transformer.ln_f")
        for number in range(c["n_layers_in_coda"]):
            x = self._sandwich(x, f"transformer.coda.{number}.")
        return [self.norm(x, "transformer.ln_f")]

    def _sandwich(self, x: Tensor, layer: str) -> Tensor:
        heads, hidden = self.config["n_heads"], self.config["n_embd"]
        qkv = linear(self.norm(x, layer + "norm_1"), self.t[layer + "attn.Wqkv.weight"])
        q, k, v = (part.unflatten(1, (heads, -1)) for part in qkv.split(hidden, 1))
        if layer + "attn.qk_bias" in self.t:
            q, k = q + self.t[layer + "attn.qk_bias"][0], k + self.t[layer + "attn.qk_bias"][1]
        angles = self.angles(len(x), hidden // heads)

        def turned(x: Tensor) -> Tensor:  # each number of a head against its neighbour
            a, b = x[..., 0::2], x[..., 1::2]
            pairs = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
            return torch.stack(pairs, -1).flatten(-2)

        o = linear(self._attend(turned(q), turned(k), v), self.t[layer + "attn.proj.weight"])
        x = self.norm(x + o, layer + "norm_2")
        gate, up = linear(self.norm(x, layer + "norm_3"), self.t[layer + "mlp.fc.weight"]).chunk(2, -1)
        return self.norm(x + linear(silu(gate) * up, self.t[layer + "mlp.proj.weight"]), layer + "norm_4")


def state_noise(seed: int, rows: int, columns: int) -> Tensor:
    """The noise a state begins as, a number at a time: the quantile that a hash of (seed, position, column) gives of
    the normal distribution within three deviations of 0."""
    normal = NormalDist()
    least = normal.cdf(-3)

    def mixed(x: int, key: int) -> int:
        x = (x ^ x >> 17) * 0xED5AD4BB % 2**32
        x = (x ^ x >> 11 ^ key) * 0xAC4C1B51 % 2**32
        x = (x ^ x >> 15) * 0x31848BAB % 2**32
        return x ^ x >> 14

    low, high = seed % 2**32, seed >> 32
    found = []
    for row in range(rows):
        first, second = mixed(row ^ low, high), mixed(row ^ high, low ^ 2**32 - 1)
        hashes = [mixed(column ^ first, second) for column in range(columns)]
        found.append([normal.inv_cdf(least + (1 - 2 * least) * (h + 0.5) / 2**32) for h in hashes])
    return torch.tensor(found)
