"""Time decisions on a CPU: prefold in this process and as a server, vLLM's /v1/systemone, and transformers' pipeline.

    python benchmarks/decide.py --data msmarco.jsonl.gz --vllm VENV --transformers --json FILE

All systems run a random checkpoint that the script writes, with SmolLM2's tokenizer. It has the shape of Qwen3 with 12
layers and a width of 576; in the case `hybrid` it has the shape of Qwen3.5. The data has one query per line: {"query":
..., "passages": [{"text": ...}, ...]}. `prefold` and vLLM read the same token ids, in vLLM's prompt format.
`prefold serve` and transformers read transformers' prompt format, with about as many tokens.

many     200 states of about 1,200 characters, 10 questions
short    2,000 states of at most 160 characters, 1 question
hybrid   40 states, 10 questions, prompts below 528 tokens, from token ids: prefold, and vLLM's log-probabilities of the
         labels, because its /v1/systemone refuses a Qwen3.5 without a tower. vLLM imports torchvision for this model

Times are from texts to answers, without loading. A server gets one request per state, with all questions. Each round
starts with empty caches. transformers computes one prompt at a time. It runs the first states of a case, and its
seconds are multiplied by (states of the case / states that it ran); the file has both numbers. `prepare` is the part of
prefold's time for rendering and tokenising.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from harness import (
    Listed,
    Peer,
    Rounds,
    benchmark,
    clocked,
    compared,
    export_folder,
    median,
    python_of,
    read_jsonl,
    run_engine,
)
from servers import Clients, ServedModel, prefold_server, vllm_server

from prefold import LLM, Decision
from prefold.tasks.base import Work

CHARACTERS, SHORT = 1200, 160
HYBRID_TOKENS = 528  # below this length vLLM shares nothing on hybrids
_ASKED = (
    "Does the text answer a question about health or medicine?",
    "Does the text name a year or a date?",
    "Does the text describe a place that a person could visit?",
    "Would an expert call the text correct and complete?",
)
_TOPICS = {
    "health": "the body, diseases, medicine, food",
    "money": "prices, wages, taxes, trade",
    "science": "nature, physics, chemistry, space",
    "people": "history, politics, biographies",
    "other": None,
}
_KINDS = {"definition": "says what a word means", "guide": "says what to do", "story": None, "advertisement": None}
_LEVELS = {
    "How clear is the text?": ["unclear", "fair", "clear"],
    "How detailed is the text?": ["a remark", "a summary", "a study"],
    "How much can the text be trusted?": ["little", "somewhat", "much", "fully"],
}
TOPIC = {"type": "choice", "instructions": "What is the text about?", "criteria": _TOPICS}
_ALL = [
    *({"type": "noul", "instructions": text} for text in _ASKED),
    TOPIC,
    {"type": "choice", "instructions": "What kind of text is it?", "criteria": _KINDS},
    {"type": "choice", "instructions": "Which tone does it have?", "criteria": {"plain": None, "excited": None}},
    *({"type": "score", "instructions": text, "criteria": levels} for text, levels in _LEVELS.items()),
]
QUESTIONS: dict[str, dict[str, Any]] = {f"q{i}": question for i, question in enumerate(_ALL)}
SIZES = {"vocab_size": 49152, "num_hidden_layers": 12, "tie_word_embeddings": True, "max_position_embeddings": 4096}
QWEN3 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
QWEN35 = {
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
}


def checkpoint(folder: Path, shape: str, dtype: torch.dtype) -> str:
    """Write a random checkpoint with SmolLM2's tokenizer, and return its folder."""
    import transformers

    kind = {"qwen3": transformers.Qwen3Config, "qwen3.5": transformers.Qwen3_5TextConfig}[shape]
    config = kind(**(SIZES | (QWEN3 if shape == "qwen3" else QWEN35)), bos_token_id=1, eos_token_id=2)
    model = {"qwen3": transformers.Qwen3ForCausalLM, "qwen3.5": transformers.Qwen3_5ForCausalLM}[shape]
    torch.manual_seed(0)
    with LLM("smollm2-135m") as source:
        export_folder(source.checkpoint, folder, dtype)
    model(config).to(dtype).save_pretrained(folder)
    return str(folder)


def states_of(data: Path, case: str, count: int) -> list[str]:
    lines = read_jsonl(data)
    if case == "short":
        texts = (passage["text"] for line in lines for passage in line["passages"])
        found = [text[:SHORT].rsplit(" ", 1)[0] for text in texts]
    else:
        most = CHARACTERS if case == "many" else CHARACTERS // 2
        found = ["\n".join(p["text"] for p in line["passages"])[:most].rsplit(" ", 1)[0] for line in lines]
    chosen = list(dict.fromkeys(found))[:count]
    if len(chosen) < count:
        raise click.ClickException(f"{data} has {len(chosen)} states for the case {case}, but {count} are needed")
    return chosen


def asked(server: ServedModel, clients: int, bodies: list[bytes]) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds of all requests to a server with an empty cache, and the answers to the questions."""
    server.go_on()
    server.forget()
    with Clients(server.port, clients) as opened:
        seconds, _, answers = opened.ask_all("/v1/systemone", bodies)
    server.pause()
    return seconds, [answer["answers"] for answer in answers]


def likelihoods(answers: list[Any]) -> np.ndarray:
    """Return the probabilities of all options of all questions, in the order of the questions."""
    found: list[float] = []
    for answer in answers:
        for one in answer.answers.values() if isinstance(answer, Decision) else answer.values():
            own = isinstance(one, dict)
            if own and one["type"] == "noul":
                found += [one["noul"], 1 - one["noul"]]
            else:
                found += (one["probabilities"] if own else one.probabilities).values()
    return np.array(found)


def label_probabilities(works: list[Work], logprobs: list[list[float]]) -> np.ndarray:
    """Return the probabilities of all options from the log-probabilities of the labels of each question."""
    parts = [np.exp(np.array(one) - max(one)) for one in logprobs]
    return np.concatenate([part / part.sum() for part in parts])


def run_case(arguments: SimpleNamespace, case: str, stack: ExitStack, folder: Path) -> dict[str, Any]:
    """Run the rounds of a case, print its table, and return its part of the file."""
    count = {"many": arguments.states, "short": arguments.short_states, "hybrid": arguments.hybrid_states}[case]
    questions = {"topic": TOPIC} if case == "short" else QUESTIONS
    states = states_of(arguments.data, case, count)
    model = checkpoint(folder, "qwen3.5" if case == "hybrid" else "qwen3", getattr(torch, arguments.dtype))
    llm = stack.enter_context(LLM(model, dtype=arguments.dtype, threads=arguments.threads))
    task = llm.task("decide", questions=questions, prompt_style="vllm")
    works = [work for work in task.prepare(states) if isinstance(work, Work)]
    requests = [request for work in works for request in work.requests]
    longest = max(request.tokens.size for request in requests)
    if case == "hybrid" and longest >= HYBRID_TOKENS:
        raise click.ClickException(f"a prompt has {longest} tokens; the maximum in this case is {HYBRID_TOKENS - 1}")
    counts = {"states": len(states), "questions": len(questions), "longest": longest}
    counts |= {"tokens": sum(request.tokens.size for request in requests)}

    rounds, prepare, rows = Rounds(case), [], []

    def decide() -> list[Any]:
        before = llm.stats.rows_computed
        if case == "hybrid":
            results = run_engine(llm.engine, requests, task.readout)
            ends = np.cumsum([0, *(len(work.requests) for work in works)])
            found = [task.finish(w.note, results[a:b]) for w, a, b in zip(works, ends[:-1], ends[1:], strict=True)]
        else:
            found = llm.decide(states, questions, prompt_style="vllm")
        rows.append(llm.stats.rows_computed - before)
        return found

    missing: dict[str, str] = {}
    systems = systems_of(arguments, case, stack, model, states, questions, requests, task, missing)
    decide()  # warm-up
    for _ in range(arguments.repeats):
        if case != "hybrid":
            prepare.append(clocked(lambda: task.prepare(states))[0])
        rounds.run("prefold", decide)
        for name, run in systems.items():
            rounds.add(name, *run())
    own = likelihoods(rounds.found["prefold"])
    differences = {}
    for name, found in rounds.found.items():
        theirs = label_probabilities(works, found) if case == "hybrid" and name != "prefold" else likelihoods(found)
        if name.lower().startswith(("prefold", "vllm")) and name != "prefold serve":  # other systems read other prompts
            differences[name] = float(np.abs(theirs - own).max())
    rates = {name: f"{count * len(questions) / median(taken):.1f}" for name, taken in rounds.seconds.items()}
    apart = {name: f"{value:.2g}" for name, value in differences.items()}
    shares = f", rendering and tokenising {median(prepare) / median(rounds.seconds['prefold']):.1%}" if prepare else ""
    print(
        f"\n{case}: {count} states, {len(questions)} questions, {counts['tokens']:,} tokens, {rows[-1]:,} rows{shares}"
    )
    print(compared(rounds.seconds, columns={"decisions/s": rates, "largest difference of a probability": apart}))
    more = {"transformers_states": min(count, arguments.transformers_states)} if arguments.transformers else {}
    more |= {"missing": missing} if missing else {}
    shape = "qwen3.5" if case == "hybrid" else "qwen3"
    measured = {"rows": rows, "prepare": prepare, "seconds": rounds.seconds, "differences": differences}
    return {"case": case, "shape": shape} | counts | measured | more


def systems_of(
    arguments: SimpleNamespace, case: str, stack: ExitStack, model: str, states: list[str],
    questions: dict[str, dict[str, Any]], requests: list[Any], task: Any, missing: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Start the other systems. Return {name: function that returns the seconds and the answers of a run}.

    A system that cannot run the case adds {system: reason} to `missing`.
    """
    job = {"model": model, "dtype": arguments.dtype, "threads": arguments.threads}
    options = {"block": int(arguments.blocks[0]), "max_model_len": 2048}
    if case == "hybrid":
        if not arguments.vllm:
            return {}
        order = [task.reader.check(question) for question in task.questions]
        scored = {
            "prompts": [r.tokens.tolist() for r in requests],
            "ids": [[int(i) for i in ids] for ids in order] * len(states),
        }
        try:
            peer = stack.enter_context(Peer(python_of(arguments.vllm), "vllm", job | options | scored))
        except RuntimeError as error:  # continue with the other cases
            missing["vLLM"] = str(error)[-600:]
            print(f"vLLM does not run this case: {missing['vLLM']}")
            return {}
        return {f"vLLM, log-probabilities (vllm {peer.version})": peer.run}
    systems: dict[str, Any] = {}
    bodies = [json.dumps({"model": model, "state": state, "questions": questions}).encode() for state in states]
    servers = [stack.enter_context(prefold_server("prefold serve", model, dtype=arguments.dtype))]
    if arguments.vllm:
        given = ["--block-size", arguments.blocks[0], "--max-model-len", "2048"]
        servers.append(stack.enter_context(vllm_server("vLLM", arguments.vllm, model, *given, dtype=arguments.dtype)))
    for server in servers:
        asked(server, arguments.clients, bodies[:8])  # warm-up
        systems[server.name] = partial(asked, server, arguments.clients, bodies)
    if arguments.transformers:
        few = states[: arguments.transformers_states]
        peer = stack.enter_context(Peer(python_of(None), "transformers", job | {"states": few, "questions": questions}))
        scale = len(states) / len(few)

        def run() -> tuple[float, Any]:
            seconds, found = peer.run()
            return seconds * scale, found

        systems[f"transformers pipeline (transformers {peer.version})"] = run
    return systems


@benchmark("data", "dtype", "threads", "repeats", "transformers", "vllm", "blocks")
@click.option(
    "--cases",
    type=Listed(among=("many", "short", "hybrid")),
    default="many,short,hybrid",
    show_default=True,
    help="Cases to run.",
)
@click.option("--states", type=int, default=200, show_default=True, help="Number of states in the case many.")
@click.option("--short-states", type=int, default=2000, show_default=True, help="Number of states in the case short.")
@click.option("--hybrid-states", type=int, default=40, show_default=True, help="Number of states in the case hybrid.")
@click.option(
    "--transformers-states", type=int, default=10, show_default=True, help="Number of states that transformers runs."
)
@click.option("--clients", type=int, default=8, show_default=True, help="Concurrent requests to a server.")
@click.option("--quick", is_flag=True, help="Run few states once, to test the script.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    if arguments.quick:
        arguments.states, arguments.short_states, arguments.hybrid_states, arguments.repeats = 6, 24, 3, 1
        arguments.transformers_states = 2
    cases = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            cases.append(run_case(arguments, case, stack, Path(folder)))
    return {"dtype": arguments.dtype, "clients": arguments.clients, "cases": cases}


if __name__ == "__main__":
    main()
