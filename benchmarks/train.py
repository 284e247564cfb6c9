"""Time a training step with and without sharing, on completions of one prompt: forward, backward and optimizer.

    python benchmarks/train.py --completions 16 --prompt 576 --completion 64 --transformers --recompute --json FILE

The model has random weights in a real shape, in float32. The loss is the cross entropy of the completions, the
optimizer AdamW. Systems: prefold's three modes (with --recompute also with layers recomputed in the backward pass), and
transformers with the same sequences in one padded batch, with sdpa attention and logits of the completions only. Each
system runs in its own process, to measure its peak memory: the memory of a step in addition to weights, gradients and
optimizer state. The FLOP ratio counts three times the forward pass: linears of all rows, attention over visible pairs,
the LM head of read rows.

The script also compares the losses of 100 steps of a small model with and without sharing.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from harness import Listed, attention_flops, benchmark, compared, median, timed, visible_pairs

from prefold.checkpoint import Checkpoint, resolve
from prefold.model import config_from
from prefold.train import TrainBatch, logprobs, sft_loss
from prefold.worker.torch.load import load_model

SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 256, "vocab_size": 512}


def make_sequences(options: SimpleNamespace, vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocab, options.prompt)
    return [np.concatenate((prompt, rng.integers(0, vocab, options.completion))) for _ in range(options.completions)]


def step_flops(batch: TrainBatch) -> float:
    """Return the FLOPs of forward and backward. The backward pass has twice the FLOPs of the forward pass."""
    config, step, reads = batch.config, batch.step, len(batch.step.read_rows)
    layer, kv = config.linear_flops / len(config.planes), 4 * config.hidden * config.kv_size
    linear = batch.num_rows * (layer * (len(config.planes) - 1) + kv) + reads * (layer - kv)
    attention = (len(config.planes) - 1) * attention_flops(config, visible_pairs(step.end))
    return 3 * (linear + attention + reads * 2 * config.hidden * config.vocab_size)


class PeakMemory:
    """The peak of memory since the object was made, minus the memory in use at that time, in bytes.

    One object measures all steps, because the allocator may retain freed memory for the next step.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # resets the peak
            self.before = self._status("VmRSS")

    def __call__(self) -> int:
        now = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._status("VmHWM")
        return now - self.before

    @staticmethod
    def _status(key: str) -> int:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key))


def prefold_loss(options: SimpleNamespace, mode: str, device: torch.device) -> tuple[torch.nn.Module, Callable]:
    checkpoint = Checkpoint.dummy(geometry(options), name=options.model)
    model = load_model(checkpoint, dtype=torch.float32, device=device, pack=False)
    model.recompute = mode.endswith("recompute")
    sequences = make_sequences(options, model.config.vocab_size)
    prompts = [options.prompt] * options.completions

    def loss() -> torch.Tensor:  # a step includes making the batch
        sharing = mode.split("-")[0]
        batch = TrainBatch.build(model.config, sequences, prompt_lengths=prompts, sharing=sharing)
        return sft_loss(logprobs(model, batch))

    return model, loss


def transformers_loss(options: SimpleNamespace, mode: str, device: torch.device) -> tuple[torch.nn.Module, Callable]:
    import transformers

    config = transformers.AutoConfig.for_model(**geometry(options))
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
    ids = torch.from_numpy(np.stack(make_sequences(options, config.vocab_size))).to(device)

    def loss() -> torch.Tensor:
        logits = model(ids, use_cache=False, logits_to_keep=options.completion + 1).logits[:, :-1]
        targets = ids[:, -options.completion :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss


def geometry(options: SimpleNamespace) -> dict:
    config = dict(resolve(options.model, load_format="dummy").config)
    return config | ({"num_hidden_layers": options.layers} if options.layers else {})


def measure(options: SimpleNamespace, mode: str, queue: multiprocessing.Queue) -> None:
    """Run the steps of one system. Return the seconds of each part of all steps but the first, and the peak memory."""
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, loss = (transformers_loss if mode == "transformers" else prefold_loss)(options, mode, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    losses = []

    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def part(name: str, run: Callable[[], Any]) -> Any:
        found: list[Any] = []
        parts[name] += timed(lambda: found.append(run()), 1, sync=sync)
        return found[0]

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates its state
    memory = PeakMemory()
    for _ in range(options.repeats + 1):
        optimizer.zero_grad(set_to_none=False)
        value = part("forward", loss)
        part("backward", value.backward)
        losses.append(float(value.detach()))
        del value
        part("optimizer", optimizer.step)
    queue.put({part: seconds[1:] for part, seconds in parts.items()} | {"peak": memory(), "losses": losses})


def in_own_process(options: SimpleNamespace, mode: str) -> dict:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(options, mode, queue))
    process.start()
    while True:
        try:
            result = queue.get(timeout=5)
            break
        except Exception:  # queue.Empty: the process may have ended
            if not process.is_alive():
                raise SystemExit(f"{mode} ended with code {process.exitcode}, maybe for lack of memory") from None
    process.join()
    return result


def curves(steps: int) -> dict[str, list[float]]:
    """Return the losses of the same steps in each mode: SFT on random groups."""
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512}
    losses: dict[str, list[float]] = {}
    for sharing in ("off", "mlp", "full"):
        model = load_model(Checkpoint.dummy(base | SMALL), dtype=torch.float32, device="cpu", pack=False)
        optimizer, rng, losses[sharing] = torch.optim.AdamW(model.parameters(), lr=1e-3), np.random.default_rng(0), []
        for _ in range(steps):
            some = []
            for _ in range(4):
                prompt = rng.integers(0, 64, 48)
                some += [np.concatenate((prompt, prompt[:8], rng.integers(0, 64, 4))) for _ in range(4)]
            batch = TrainBatch.build(model.config, some, prompt_lengths=[48] * 16, sharing=sharing)
            loss = sft_loss(logprobs(model, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[sharing].append(float(loss.detach()))
    return losses


@benchmark("model", "layers", "threads", "transformers", "repeats")
@click.option("--completions", type=int, default=16, show_default=True, help="Number of completions.")
@click.option("--prompt", type=int, default=576, show_default=True, help="Tokens of the prompt.")
@click.option("--completion", type=int, default=64, show_default=True, help="Tokens of a completion.")
@click.option("--modes", type=Listed(), default="full,mlp,off", show_default=True, help="prefold's sharing modes.")
@click.option("--recompute", is_flag=True, help="Also recompute layers in the backward pass.")
@click.option("--curve-steps", type=int, default=100, show_default=True, help="Number of steps with compared losses.")
def main(options: SimpleNamespace) -> dict[str, Any]:
    config = config_from(geometry(options))
    sequences = make_sequences(options, config.vocab_size)
    prompts = [options.prompt] * options.completions
    systems = options.modes + [f"{mode}-recompute" for mode in options.modes if options.recompute]
    systems += ["transformers"] if options.transformers else []
    batches = {
        mode: TrainBatch.build(config, sequences, prompt_lengths=prompts, sharing=mode)
        for mode in ("full", "mlp", "off")
    }
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    results = {}
    for system in systems:
        results[system] = in_own_process(options, system)
        print("  ", system, json.dumps(results[system]), flush=True)
    parts = ("forward", "backward", "optimizer")
    whole = {
        system: [sum(s) for s in zip(*(of[part] for part in parts), strict=True)] for system, of in results.items()
    }
    batch_of = {system: batches.get(system.split("-")[0], batches["off"]) for system in systems}
    columns: dict[str, dict[str, object]] = {"rows": {name: batch.num_rows for name, batch in batch_of.items()}}
    columns |= {f"{part} s": {name: f"{median(of[part]):.2f}" for name, of in results.items()} for part in parts}
    off = step_flops(batches["off"])
    columns["FLOP ratio"] = {name: f"{off / step_flops(batch):.2f}" for name, batch in batch_of.items()}
    columns["peak GB"] = {name: f"{of['peak'] / 1e9:.2f}" for name, of in results.items()}
    columns["last loss"] = {name: f"{of['losses'][-1]:.5f}" for name, of in results.items()}
    print(compared(whole, columns=columns))
    losses = curves(options.curve_steps)
    apart = {
        mode: max(abs(a - b) / a for a, b in zip(losses["off"], losses[mode], strict=True)) for mode in ("mlp", "full")
    }
    first, last = losses["off"][0], losses["off"][-1]
    print(f"{options.curve_steps} steps, loss {first:.4f} to {last:.4f}; largest relative difference from off: {apart}")
    return {"model": options.model, "layers": config.layers, "steps": results, "curves": losses}


if __name__ == "__main__":
    main()
