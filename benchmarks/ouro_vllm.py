"""Compares Ouro at full depth with vLLM: log-probabilities of prompts, and what greedily follows them.

    python benchmarks/ouro_vllm.py --vllm VENV [--ouro FILE] [--smoke] [--json FILE]

A small checkpoint of random weights is written, in float32, and read by both. vLLM runs in a process of its own, by the
Python of the environment VENV. Its versions from 0.27 on have no Ouro any more: there --ouro names the file
vllm/model_executor/models/ouro.py of an earlier one, which is registered as a model. vLLM makes all visits, so that
there is nothing to compare exits with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, write_json
from safetensors.torch import save_file

from prefold import LLM

CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 307,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
}

# Run by the other Python: reads what to do from a file, and writes what it found.
OTHER = """
import importlib.util, json, sys
import vllm
from transformers import AutoConfig, PretrainedConfig
from vllm import LLM, ModelRegistry, SamplingParams

class OuroConfig(PretrainedConfig):
    model_type = "ouro"

AutoConfig.register("ouro", OuroConfig)
asked = json.load(open(sys.argv[1]))
if asked["ouro"]:
    name = "vllm.model_executor.models.ouro"
    spec = importlib.util.spec_from_file_location(name, asked["ouro"])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def load_weights(self, weights):  # the loader takes no prefixes to leave out any more
        from vllm.model_executor.models.utils import AutoWeightsLoader
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    module.OuroForCausalLM.load_weights = load_weights
    ModelRegistry.register_model("OuroForCausalLM", module.OuroForCausalLM)
llm = LLM(asked["folder"], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32,
          max_model_len=256, max_num_seqs=16, enable_prefix_caching=False)
sampling = SamplingParams(
    temperature=0, max_tokens=asked["tokens"], ignore_eos=True, prompt_logprobs=1, detokenize=False
)
outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], sampling, use_tqdm=False)
found = [
    {
        "tokens": list(one.outputs[0].token_ids),
        "logprobs": [at[token].logprob for at, token in zip(one.prompt_logprobs[1:], one.prompt_token_ids[1:])],
    }
    for one in outputs
]
json.dump({"version": vllm.__version__, "found": found}, open(sys.argv[2], "w"))
"""


def write_checkpoint(folder: Path) -> None:
    """Writes a checkpoint of random weights."""
    generator, size, width = torch.Generator().manual_seed(0), CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], size),
        "lm_head.weight": (CONFIG["vocab_size"], size),
        "model.norm.weight": (size,),
        "model.early_exit_gate.weight": (1, size),
        "model.early_exit_gate.bias": (1,),
    }
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
        shapes |= {f"{layer}{name}.weight": (size,) for name in norms}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (size, size) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (width, size) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (size, width)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * values if "norm" in name else 1.5 * values / shape[-1] ** 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": CONFIG["rope_theta"]}}
    (folder / "config.json").write_text(json.dumps(CONFIG | rope))


def main() -> int:
    """Returns the exit status: 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="a virtual environment with vLLM")
    parser.add_argument("--ouro", type=Path, help="models/ouro.py of a vLLM that had it")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24, help="generated after each prompt")
    parser.add_argument("--smoke", action="store_true", help="two prompts, two tokens")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.smoke:
        options.prompts = options.tokens = 2
    rng = np.random.default_rng(0)
    shared = rng.integers(3, CONFIG["vocab_size"], 40).tolist()
    lengths = rng.integers(1, 60, options.prompts).tolist()
    prompts = [[*shared, *rng.integers(3, CONFIG["vocab_size"], length).tolist()] for length in lengths]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_checkpoint(folder)
        asked, found = folder / "asked.json", folder / "found.json"
        ouro = None if options.ouro is None else str(options.ouro.resolve())
        asked.write_text(
            json.dumps({"folder": made, "prompts": prompts, "tokens": options.tokens, "ouro": ouro}), encoding="utf-8"
        )
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"PATH": "/usr/bin:/bin", "HOME": made, "VLLM_LOGGING_LEVEL": "ERROR"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        python = options.vllm / "bin" / "python"
        subprocess.run([python, "-c", OTHER, asked, found], check=True, env=environment)
        other = json.loads(found.read_text())
        llm = LLM(made, dtype="float32", device="cpu")
        ours = llm.generate(prompts, max_tokens=options.tokens, temperature=0, ignore_eos=True)
        scores = llm.score([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts])
        llm.close()
    furthest = max(
        float(np.abs(np.array(score.logprobs) - one["logprobs"]).max())
        for score, one in zip(scores, other["found"], strict=True)
    )
    same = sum(list(a.tokens) == b["tokens"] for a, b in zip(ours, other["found"], strict=True))
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"vLLM {other['version']}: {same} of {len(prompts)} continuations of {options.tokens} tokens are equal")
    print(f"log-probabilities of {sum(map(len, prompts)) - len(prompts)} tokens differ by at most {furthest:.2g}")
    write_json(
        options.json, benchmark="ouro_vllm", vllm=other["version"], prompts=len(prompts), same=same, furthest=furthest
    )
    return int(same < len(prompts) or furthest > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
