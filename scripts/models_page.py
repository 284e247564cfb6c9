"""Print docs/models.md: the registered families, and known checkpoints for embedding and reranking.

python scripts/models_page.py > docs/models.md
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from prefold.checkpoint.gguf_config import ARCHITECTURES as OF_GGUF
from prefold.model.families import families_by_function
from prefold.spec.plugins import load_plugins

LAST = (
    "last-token pooling, normalized, from its files; `Instruct: {instruction}\\nQuery:{text}` for queries "
    "(`--instruction`)"
)
BGE = (
    "A: {query}\\nB: {document}\\nGiven a query A and a passage B, determine whether the passage contains an answer to "
    "the query by providing a prediction of either 'Yes' or 'No'."
)
MXBAI = (
    "<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n"
    "<|im_start|>user\\nquery: {query}\\ndocument: {document}\\nYou are a search relevance expert who evaluates how "
    "well documents match search queries. For each query-document pair, carefully analyze the semantic relationship "
    "between them, then provide your binary relevance judgment (0 for not relevant, 1 for relevant).\\nRelevance:"
    "<|im_end|>\\n<|im_start|>assistant\\n"
)
ALONE = "a tiny model of the architecture, random weights"
SHAPE = "its shape with two layers, random weights"
FILES = "its files with a tiny model, random weights"
LOGITS = (
    "nothing: prefold uses the chat template, tokens and activation in its files for sentence-transformers' "
    "CrossEncoder (`1_LogitScore`); `--instruction` becomes the system message"
)


@dataclass(frozen=True)
class Known:
    """A checkpoint that works or is refused."""

    names: str  # on the hub
    architecture: str  # in its config.json
    task: str  # "embed" or "rerank"
    needs: str = ""  # options that it needs, and defaults that prefold picks
    ran: str = ALONE  # what was tested
    refused: str = ""  # words of the error that refuses it; "": it works
    settings: tuple[tuple[str, object], ...] = ()  # entries of its config.json that cause the refusal


CHECKPOINTS = (
    Known("Qwen/Qwen3-Embedding-0.6B, -4B, -8B", "Qwen3ForCausalLM", "embed", LAST, SHAPE),
    Known("microsoft/harrier-oss-v1-0.6b", "Qwen3Model", "embed", LAST, SHAPE),
    Known("microsoft/harrier-oss-v1-270m", "Gemma3TextModel", "embed", LAST, SHAPE),
    Known(
        "jinaai/jina-embeddings-v5-text-small",
        "Qwen3Model",
        "embed",
        "the repository of one task, with its adapter merged; last-token pooling, normalized; the prompts in its files "
        "(`--prompt-name`)",
        SHAPE,
    ),
    Known(
        "codefuse-ai/F2LLM-v2-80M to -14B, F2LLM-0.6B, -1.7B, -4B",
        "Qwen3Model",
        "embed",
        LAST + "; the tokenizer must append the EOS to each text, as the files of version 2 do",
    ),
    Known(
        "Octen/Octen-Embedding-0.6B, -4B, -8B",
        "Qwen3ForCausalLM",
        "embed",
        "last-token pooling, normalized, from its files; plain texts, or a prompt in its files (`--prompt-name`)",
    ),
    Known("intfloat/e5-mistral-7b-instruct and its fine-tunes", "MistralModel", "embed", LAST),
    Known(
        "Qwen/Qwen3-Reranker-0.6B, -4B, -8B",
        "Qwen3ForCausalLM",
        "rerank",
        "nothing: prefold uses its own template, or the template and activation in its files for CrossEncoder; "
        "`--instruction` if the default instruction does not fit",
        SHAPE,
    ),
    Known(
        "Qwen3-Reranker as a classifier of one label",
        "Qwen3ForSequenceClassification",
        "rerank",
        "nothing: prefold uses Qwen3-Reranker's prompt",
    ),
    Known(
        "BAAI/bge-reranker-v2-gemma",
        "GemmaForCausalLM",
        "rerank",
        f'`--template` "{BGE}", `--words` Yes No. Tokens equal FlagEmbedding\'s, with BOS. The score is '
        "Yes against No; FlagEmbedding's score is the logit of Yes alone, which can give another order",
    ),
    Known(
        "jinaai/jina-reranker-v3",
        "JinaForRanking",
        "rerank",
        "nothing: one prompt holds all documents of a query, at most 125, and a score is read after each document. "
        "Give a query with its list of documents; the score is a cosine. prefold does not truncate documents; the "
        "model's own code truncates them to 2,048 tokens, as `max_tokens_per_doc` of an item does. GGUF files lack the "
        "projector, and are refused",
        FILES,
    ),
    Known(
        "mixedbread-ai/mxbai-rerank-base-v2, -large-v2",
        "Qwen2ForCausalLM",
        "rerank",
        f'{LOGITS}. A copy without these files needs `--words` 1,0 and `--template` "{MXBAI}"',
        FILES,
    ),
    Known(
        "infgrad/Prism-Qwen3.5-Reranker-0.8B, -2B, -4B, -9B, Prism-Qwen3-Reranker-4B-exp",
        "Qwen3_5ForCausalLM",
        "rerank",
        LOGITS + ". For the text after a yes, use `llm.chat` with the messages query and document "
        "([more](tasks.md#rerank))",
        FILES,
    ),
    Known("zeroentropy/zerank-2", "Qwen3ForCausalLM", "rerank", LOGITS, FILES),
    Known(
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct, -7B-instruct",
        "Qwen2ForCausalLM",
        "embed",
        refused="both directions",
        settings=(("is_causal", False),),
    ),
    Known(
        "google/embeddinggemma-300m",
        "Gemma3TextModel",
        "embed",
        refused="both directions",
        settings=(("use_bidirectional_attention", True),),
    ),
    Known("google/embeddinggemma-2", "EmbeddingGemma2Model", "embed", refused="an encoder"),
    Known(
        "nvidia/llama-nemotron-embed-1b-v2, llama-3.2-nv-embedqa-1b-v2",
        "LlamaBidirectionalModel",
        "embed",
        refused="made to attend in both directions",
    ),
    Known(
        "nvidia/llama-nemotron-rerank-1b-v2",
        "LlamaBidirectionalForSequenceClassification",
        "rerank",
        refused="made to attend in both directions",
    ),
    Known(
        "nvidia/llama-embed-nemotron-8b",
        "LlamaModel",
        "embed",
        refused="both directions",
        settings=(("use_bidirectional_attention", True),),
    ),
    Known(
        "BAAI/bge-m3, bge-reranker-v2-m3, intfloat/multilingual-e5-*", "XLMRobertaModel", "embed", refused="an encoder"
    ),
    Known(
        "sentence-transformers/all-MiniLM-*, BAAI/bge-*-en-v1.5, intfloat/e5-*, cross-encoder/ms-marco-*",
        "BertModel",
        "embed",
        refused="an encoder",
    ),
    Known("Alibaba-NLP/gte-modernbert-base", "ModernBertModel", "embed", refused="an encoder"),
    Known("sentence-transformers/all-mpnet-base-v2", "MPNetModel", "embed", refused="an encoder"),
)

HEAD = """# Models

See which models this installation runs, then run one:

```sh
prefold models
prefold generate "What is a prefix?" -m HuggingFaceTB/SmolLM2-135M-Instruct
```

prefold picks the model family by the architecture in the checkpoint's `config.json` or GGUF file. If the config asks
for something that prefold does not support, the error names the key. `scripts/models_page.py` writes this page.

## Adding a family

A Python file adds an architecture that is missing here; `--plugin` names the file. There is one real example of each
kind. Each has fewer than 40 lines, and prefold's tests compare it with transformers:

| kind | example | what it shows |
|---|---|---|
| dense | [BioGPT](families.md#a-family-of-your-own-an-example) | norms, names, learned positions |
| mixture of experts | [FlexOlmo](families.md#a-mixture-of-experts) | router rules, norms over all heads |
| hybrid | [LFM2](hybrids.md#a-hybrid-of-your-own) | a mixer with a state instead of attention |

## Families

Words in this table: a *sublayer* is the attention or the MLP of a layer. *Experts* are a mixture of experts (MoE).
*Fused* tensors hold several linears. In *interleaved RoPE*, the two elements of a rotated pair are neighbours.

| family | architectures | GGUF |
|---|---|---|
"""
LONGROPE = """
**LongRoPE** (Phi 3.5, Phi 3.5 MoE, Phi 4 mini, Phi 3 with 128k). These models have two sets of rotary factors: one
for sequences of at most 4,096 tokens, one for longer sequences. transformers chooses a set per sequence. The keys of
a prefix then depend on what follows, and cannot be shared. prefold uses one set for all sequences of a job or server:

- `context_length` (`--context-length`) selects the set. Its default is the model's own 131,072, which selects the
  long set.
- With `--context-length 4096`, results equal the results of transformers, and prompts of more than 4,096 tokens are
  refused.
- A job's summary and a server's log name the set.
- For longer sequences of Phi 3.5 MoE, transformers uses the short factors. prefold uses the long factors, as
  Microsoft's own code does.

**Soft caps** on attention scores (Gemma 2) run in the compiled kernels on a CPU. On a GPU they run in PyTorch, which
is slower than the kernels.

**gpt-oss** has experts in MXFP4, with 4 bits per weight, in safetensors and in GGUF files. On a CPU they stay in
MXFP4: gpt-oss-20b takes 14 GB of memory, gpt-oss-120b 65 GB. PyTorch (on a GPU, or on several ranks) holds them in
bfloat16 (42 and 234 GB). The conversion loses nothing, because every MXFP4 value is exact in bfloat16. Other
quantized safetensors checkpoints are refused.

**GGUF files**

- Files of Starcoder 2 do not state its sliding window, so prefold uses none.
- Files of SmolLM 3 do not state which layers have no RoPE. prefold assumes every fourth layer, as llama.cpp does.
- Files of OLMo 3 with YaRN and their own attention factor are refused.
- Files of [hybrids](hybrids.md) are read as llama.cpp's converter writes them.
- A file without `tokenizer.ggml.pre` is tokenized with GPT-2's split rules, with a warning.
- A file with repeated names or overlapping tensors is refused.

**Gemma 4** has heads of two sizes.

- In E2B and E4B, the last layers read the keys and values of earlier layers, which are stored once. After the last
  layer with its own keys, a pass drops rows that no request reads.
- E2B and E4B also have an embedding table per layer: 2.3 billion parameters in E2B, of which a token reads 8,960. The
  tables stay in the mapped file, or in the GGUF file's format.
- Checkpoints with towers (`Gemma4ForConditionalGeneration`) accept text and [images](images.md#models); audio and
  video are refused. A GGUF model may have its tower in a second file (`mmproj`).
- The 12B (`gemma4_unified`), and Gemma 3n with towers, accept text only.
- Gemma 3n and 4 do not run with `tensor_parallel`, in int8 or layer by layer.
- For the standard deviation of Gemma 3n's gates, llama.cpp divides by n - 1; transformers and prefold divide by n.

**Latent attention** (MLA: DeepSeek, GLM-4.7-Flash, Youtu, MiniCPM 3, Mistral Small 4). The KV store holds a latent
and the rotated end of the key per row. For GLM-4.7-Flash that is 54 KB per token in bfloat16; keys and values of all
heads would take 0.96 MB. prefold attends in one of two exact ways.

- Prefill for embeddings, scores, labels and decisions computes the keys and values of all heads from the latents, once
  per step.
- In generation and in the server, the native executor chooses the cheaper way for each query. The rows of a long prompt
  expand the keys that they share: from about 250 rows per step for GLM-4.7-Flash, from 110 for DeepSeek-V3. Decode rows
  attend in the latent space: the key matrices are multiplied into the queries. With `invariant`, all rows do.

These models do not run with `tensor_parallel` or in int8.
GGUF files of DeepSeek V2 and V3, GLM-4.7-Flash and Youtu are supported (`deepseek2`).

## Checkpoints for embedding and reranking

Names, pooling and prompts come from the checkpoints' own pages. The last column says what was tested here; the
published weights were not available.
"""
WHY = """
Encoders (BERT, RoBERTa, ModernBERT, MPNet and their derivatives) let every token see later tokens too, so no two
texts can share the computation of a prefix. prefold refuses them; other programs run them well. It also refuses
decoders that were fine-tuned to attend in both directions.

| refused | architecture | reason |
|---|---|---|
"""


def page() -> str:
    """Return the text of docs/models.md."""
    load_plugins()  # features add families and GGUF names
    of_gguf: dict[str, list[str]] = {}
    for name, architecture in OF_GGUF.items():
        of_gguf.setdefault(architecture, []).append(name)
    families = []
    for function, architectures in families_by_function().items():
        if not function.__module__.startswith("prefold."):
            continue
        about = " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())
        about = re.sub("^Returns? the config of (an? )?", "", about).partition(". ")[0].rstrip(".")
        about = about[:1].upper() + about[1:]
        files = [name for architecture in architectures for name in of_gguf.get(architecture, ())]
        families.append(f"| {about} | {', '.join(architectures)} | {', '.join(files)} |")
    works = [
        f"| {known.names} | {known.task} | {known.needs} | {known.architecture} | {known.ran} |"
        for known in CHECKPOINTS
        if not known.refused
    ]
    refused = [
        f"| {known.names} | {known.architecture} | {_because(known)} |" for known in CHECKPOINTS if known.refused
    ]
    table = "\n| checkpoint | task | what it needs | architecture | tested here |\n|---|---|---|---|---|\n"
    lines = (sorted(families), works, refused)
    parts = zip((HEAD, LONGROPE + table, WHY), lines, strict=True)
    return "".join(head + "\n".join(rows) + "\n" for head, rows in parts)


def _because(known: Known) -> str:
    settings = ", ".join(f"`{key}`: {str(value).lower()}" for key, value in known.settings)
    return f"it attends in {known.refused} ({settings})" if settings else f"it is {known.refused}"


if __name__ == "__main__":
    print(page(), end="")
