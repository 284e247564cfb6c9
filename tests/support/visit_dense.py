"""What rows of a looped model compute where they leave, or take routes: a row at a time, as the rule is written down.

A row goes through the blocks of its route. At each it sees itself and, of every row before it, the K/V which that row
has at this visit. Of a row that left before, these are the K/V of its last visit to this block; where there was none,
or `keys` is "project", they are what the layers of the block make of the state that the row left with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from looped_dense import Dense, state_noise
from torch import Tensor
from torch.nn.functional import linear, silu

from prefold.spec.requests import Exits


class RowByRow:
    """What a checkpoint computes for one sequence whose rows come one after the other.

    made    after how many visits each row left
    hidden  of each row, as it is read
    """

    def __init__(self, dense: Dense, keys: str = "last"):
        self.dense, self.t, self.keys, c = dense, dense.t, keys, dense.config
        if dense.family == "huginn":
            sizes = [c[key] for key in ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")]
            parts, numbers = ("prelude", "core_block", "coda"), [range(size) for size in sizes]
            names = [[f"transformer.{part}.{n}." for n in some] for part, some in zip(parts, numbers, strict=True)]
            self.prelude, self.blocks, self.coda = names[0], [names[1]], names[2]
            self.order, self.between = (0,) * c["mean_recurrence"], "inject"
            self.noise = (c.get("state_seed", 0), math.sqrt(2 / (5 * c["n_embd"])) * math.sqrt(c["n_embd"]))
        else:
            layers = [f"model.layers.{n}." for n in range(c["num_hidden_layers"])]
            loop = c.get("loop", {"blocks": 1, "order": [0] * c.get("total_ut_steps", 0), "between": "norm"})
            first, last = loop.get("prelude", 0), len(layers) - loop.get("coda", 0)
            size = (last - first) // loop["blocks"]
            self.prelude, self.coda = layers[:first], layers[last:]
            self.blocks = [layers[first + b * size : first + (b + 1) * size] for b in range(loop["blocks"])]
            self.order, self.between = tuple(loop["order"]), loop.get("between", "nothing")
            self.noise = (loop.get("seed", 0), loop.get("noise", 0.0))

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], prompt: int, exits: Exits, route: Sequence[int] | None = None) -> RowByRow:
        """tokens: those of the prompt, `prompt` many, and of the tail. exits: with a threshold."""
        self.route = tuple(self.order if route is None else route)
        self.own: dict[tuple, tuple[Tensor, Tensor]] = {}  # by row, visit and layer: keys and values
        self.turns: dict[int, tuple[Tensor, Tensor]] = {}  # by row: cosines and sines of its angles
        self.state: list[Tensor] = []  # that each row left with
        self.given: list[Tensor] = []
        self.made: list[int] = []
        self.hidden: list[Tensor] = []
        noise = state_noise(self.noise[0], len(tokens), self.t[self._embedding].shape[1]) * self.noise[1]
        for row, token in enumerate(tokens):
            x = self.t[self._embedding][[token]]
            if self.dense.family == "huginn":
                x = x * math.sqrt(x.shape[1])
            x = self._through(x, row, "prelude", self.prelude)
            self.given.append(x)
            if self.between == "inject":
                x = noise[[row]]
            may = exits if row >= prompt or exits.prompts else Exits(1.0)
            stays, has_left = torch.ones(()), torch.zeros(())
            reads: list[Tensor] = []
            for t, block in enumerate(self.route):
                before = x
                x = self._through(self._brought(x, row), row, t, self.blocks[block])
                if self.between == "norm":
                    x = self.dense.norm(x, "model.norm")
                reads.append(self._read(x))
                share = self._share(reads) if may.threshold not in (None, 1) else torch.zeros(())
                stays, has_left = stays * (1 - share), has_left + share * stays
                given = exits.visits[row - prompt] if 0 <= row - prompt < len(exits.visits) else None
                leaves = self._leaves(may, t + 1, has_left, before, x) if given is None else t + 1 == given
                if t + 1 == len(self.route) or leaves:
                    break
            self.made.append(t + 1)
            self.state.append(x)
            self.hidden.append(self._end(x, row)[0])
        return self

    def _leaves(self, exits: Exits, number: int, has_left: Tensor, before: Tensor, x: Tensor) -> bool:
        if exits.max_visits is not None and number >= exits.max_visits:
            return True
        if number < exits.min_visits:
            return False
        if exits.threshold not in (None, 1) and has_left >= exits.threshold:
            return True
        return exits.change is not None and bool((x - before).norm() / before.norm() <= exits.change)

    def _share(self, reads: list[Tensor]) -> Tensor:
        """reads: the states as they are read after each visit so far."""
        name = "model.early_exit_gate" if self.dense.family == "ouro" else "model.gate"
        features = self.dense.config.get("loop", {}).get("gate_reads") == "features"
        read = self.dense.features(reads) if features else reads[-1]
        return torch.sigmoid(linear(read, self.t[name + ".weight"], self.t[name + ".bias"]))[0, 0]

    @property
    def _final_norm(self) -> str:
        return "transformer.ln_f" if self.dense.family == "huginn" else "model.norm"

    def _end(self, x: Tensor, row: int) -> Tensor:
        if not self.coda:
            return self._read(x)
        if self.between == "inject":
            x = self.dense.norm(x, self._final_norm)
        return self.dense.norm(self._through(x, row, "coda", self.coda), self._final_norm)

    def _read(self, x: Tensor) -> Tensor:
        """A state as it is read after any visit where there is no coda."""
        if self.between == "norm":
            return x
        x = self.dense.norm(x, self._final_norm) if self.between == "inject" else x
        return self.dense.norm(x, self._final_norm)

    def _brought(self, x: Tensor, row: int) -> Tensor:
        if self.between == "add":
            return self.dense.norm(x, self._final_norm) + self.dense.norm(self.given[row], self._final_norm)
        if self.between != "inject":
            return x
        name = "transformer.adapter.weight" if self.dense.family == "huginn" else "model.inject.weight"
        return linear(torch.cat((x, self.given[row]), -1), self.t[name])

    def _through(self, x: Tensor, row: int, visit: int | str, layers: list[str]) -> Tensor:
        for layer in layers:
            q, k, v = self._qkv(x, row, layer)
            self.own[row, visit, layer] = k, v
            seen = [self._seen(other, visit, layer) for other in range(row)] + [(k, v)]
            o = self._attend(q, torch.stack([k for k, _ in seen]), torch.stack([v for _, v in seen]))
            x = self._finish(x, o, layer)
        return x

    def _seen(self, row: int, visit: int | str, layer: str) -> tuple[Tensor, Tensor]:
        if (row, visit, layer) in self.own:
            return self.own[row, visit, layer]
        if self.keys == "last":
            for earlier in range(self.made[row] - 1, -1, -1):
                if self.route[earlier] == self.route[visit]:
                    return self.own[row, earlier, layer]
        self.own[row, visit, layer] = self._qkv(self._brought(self.state[row], row), row, layer)[1:]
        return self.own[row, visit, layer]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [heads, dim], k, v [keys, kv_heads, dim] -> [1, heads * dim]"""
        group = q.shape[0] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = (torch.einsum("hd,khd->hk", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, v).reshape(1, -1)

    def _qkv(self, x: Tensor, row: int, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        c, t, norm = self.dense.config, self.t, self.dense.norm
        if self.dense.family == "huginn":
            heads = c["n_heads"]
            qkv = linear(norm(x, layer + "norm_1"), t[layer + "attn.Wqkv.weight"])
            q, k, v = (part.view(heads, -1) for part in qkv[0].split(c["n_embd"]))
            if layer + "attn.qk_bias" in t:
                q, k = q + t[layer + "attn.qk_bias"][0, 0], k + t[layer + "attn.qk_bias"][1, 0]
        else:
            h = norm(x, layer + "input_layernorm")
            dim = c["hidden_size"] // c["num_attention_heads"]
            q, k, v = (linear(h, t[f"{layer}self_attn.{n}_proj.weight"]).view(-1, dim) for n in "qkv")
        if row not in self.turns:
            angles = self.dense.angles(row + 1, q.shape[-1])[-1]
            self.turns[row] = angles.cos(), angles.sin()
        q, k = self._turned(torch.cat((q, k)), *self.turns[row]).split((len(q), len(k)))
        return q, k, v

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.dense.family == "huginn":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _finish(self, x: Tensor, o: Tensor, layer: str) -> Tensor:
        t, norm = self.t, self.dense.norm
        if self.dense.family == "huginn":
            x = norm(x + linear(o, t[layer + "attn.proj.weight"]), layer + "norm_2")
            gate, up = linear(norm(x, layer + "norm_3"), t[layer + "mlp.fc.weight"]).chunk(2, -1)
            return norm(x + linear(silu(gate) * up, t[layer + "mlp.proj.weight"]), layer + "norm_4")
        o = linear(o, t[layer + "self_attn.o_proj.weight"])
        ouro = self.dense.family == "ouro"
        x = x + (norm(o, layer + "input_layernorm_2") if ouro else o)
        mlp = self.dense.llama_mlp(x, layer)
        return x + (norm(mlp, layer + "post_attention_layernorm_2") if ouro else mlp)

    @property
    def _embedding(self) -> str:
        return next(n for n in ("transformer.wte.weight", "model.embed_tokens.weight") if n in self.t)
