"""Writes docs/models.md: the families of the registry, and checkpoints for embedding and reranking that work with them.

python scripts/models_page.py > docs/models.md
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from prefold.checkpoint.gguf_config import ARCHITECTURES as OF_GGUF
from prefold.model.families import families_by_function
from prefold.spec.plugins import load_plugins

LAST = "last token, length 1, as its files say; `Instruct: {instruction}\\nQuery:{text}` for queries (`--instruction`)"
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
ALONE = "the architecture at a tiny size, with random weights"
SHAPE = "its shape with two layers of random weights"
FILES = "its files at a tiny size, with random weights"
LOGITS = (
    "nothing: the chat template, the tokens and the activation that its files name for sentence-transformers' "
    "CrossEncoder (`1_LogitScore`); `--instruction` becomes the system message"
)


@dataclass(frozen=True)
class Known:
    """A Known is a checkpoint that works, or that is refused.

    names         of the checkpoint, on the hub
    architecture  that its config.json names
    task          "embed" or "rerank"
    needs         what prefold does by itself, or has to be told
    ran           what was run
    refused       words of the reason why it is refused; "": it works
    settings      those of its config.json that decide
    """

    names: str
    architecture: str
    task: str
    needs: str = ""
    ran: str = ALONE
    refused: str = ""
    settings: tuple[tuple[str, object], ...] = ()


CHECKPOINTS = (
    Known("Qwen/Qwen3-Embedding-0.6B, -4B, -8B", "Qwen3ForCausalLM", "embed", LAST, SHAPE),
    Known("microsoft/harrier-oss-v1-0.6b", "Qwen3Model", "embed", LAST, SHAPE),
    Known("microsoft/harrier-oss-v1-270m", "Gemma3TextModel", "embed", LAST, SHAPE),
    Known(
        "jinaai/jina-embeddings-v5-text-small",
        "Qwen3Model",
        "embed",
        "the repository of one task, with its adapter merged; last token, length 1; the prompts of its files "
        "(`--prompt-name`)",
        SHAPE,
    ),
    Known(
        "codefuse-ai/F2LLM-v2-80M to -14B, F2LLM-0.6B, -1.7B, -4B",
        "Qwen3Model",
        "embed",
        LAST + "; the tokenizer has to put the EOS behind each text, as the files of version 2 do",
    ),
    Known(
        "Octen/Octen-Embedding-0.6B, -4B, -8B",
        "Qwen3ForCausalLM",
        "embed",
        "last token, length 1, as its files say; texts as they are, or a prompt of its files (`--prompt-name`)",
    ),
    Known("intfloat/e5-mistral-7b-instruct and those made of it", "MistralModel", "embed", LAST),
    Known(
        "Qwen/Qwen3-Reranker-0.6B, -4B, -8B",
        "Qwen3ForCausalLM",
        "rerank",
        "nothing: the default template is its own, or that of the files for CrossEncoder if the folder has them, with "
        "their activation; `--instruction` where the default one does not fit",
        SHAPE,
    ),
    Known(
        "Qwen3-Reranker as a classifier of one label",
        "Qwen3ForSequenceClassification",
        "rerank",
        "nothing: it gets Qwen3-Reranker's prompt",
    ),
    Known(
        "BAAI/bge-reranker-v2-gemma",
        "GemmaForCausalLM",
        "rerank",
        f'`--template` "{BGE}", `--words` Yes No. The tokens are those of FlagEmbedding, with BOS. The '
        "score is Yes against No; FlagEmbedding has the logit of Yes "
        "alone, which can rank otherwise",
    ),
    Known(
        "jinaai/jina-reranker-v3",
        "JinaForRanking",
        "rerank",
        "nothing: all documents of a query stand in one prompt, up to 125, and are read behind each of them. Give a "
        "query with its list of documents; the score is a cosine. Documents are not cut: the model's own code cuts them"
        " at 2,048 tokens, which `max_tokens_per_doc` of an item does too. GGUF files lack the projector, and are "
        "refused",
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
        LOGITS + ". The text behind a yes is `llm.chat` of the messages query and document "
        "([more](cli.md#prefold-rerank))",
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

A checkpoint is taken by the architecture that its `config.json` names, or its GGUF file. What a config asks for and
prefold does not do is an error that names the key. This page is written by `scripts/models_page.py`.

## Adding a family

An architecture that is not here is added by a file of your own, which `--plugin` names. One real example of each kind,
each in under 40 lines and run as one of prefold's tests against transformers:

| kind | example | what it shows |
|---|---|---|
| dense | [BioGPT](families.md#a-family-of-your-own-an-example) | norms, names, learned positions |
| mixture of experts | [FlexOlmo](families.md#a-mixture-of-experts) | a router's rules, beside norms over all heads |
| hybrid | [LFM2](hybrids.md#a-hybrid-of-your-own) | a mixer with a state of its own, in place of attention |

## Families

| family | architectures | GGUF |
|---|---|---|
"""
LONGROPE = """
**LongRoPE** (Phi 3.5, Phi 3.5 MoE, Phi 4 mini, Phi 3 with 128k). These models have two sets of rotary factors, for
sequences of up to 4,096 tokens and for longer ones. transformers chooses by each sequence, so that the keys of a prefix
depend on what follows it, and cannot be shared. Here one set holds for all sequences of a job or of a server, chosen by
the longest one that there may be: `context_length` (`--context-length`), by default the model's own 131,072, which
takes the set of long sequences. With `--context-length 4096` it is the other set, results are those of transformers,
and prompts of more than 4,096 tokens are refused. A job's summary and a server's log say which set it is. To longer
sequences of Phi 3.5 MoE transformers gives the factors of short ones; here they have those of long ones, as in its
makers' code.

**Soft caps** on the scores of attention (Gemma 2) are computed by the compiled kernels on a CPU, and by PyTorch on a
GPU, which is slower than the kernels there.

**gpt-oss** has experts in MXFP4, four bits a number, in safetensors and in GGUF files. On a CPU they stay so: the
weights of gpt-oss-20b take 14 GB of memory, and those of gpt-oss-120b 65 GB. PyTorch, on a GPU or on several ranks,
has them in bfloat16 (42 and 234 GB). Nothing is lost: every number of MXFP4 is one of bfloat16. Other checkpoints
that are quantised in safetensors are refused.

**GGUF files** of Starcoder 2 do not say its sliding window, which then is not there; those of SmolLM 3 do not say which
layers rotate nothing: every fourth one, as in llama.cpp. Files of OLMo 3 with yarn are refused where they have an
attention factor of their own. Those of [hybrids](hybrids.md) are read as llama.cpp's converter writes them. A file
without `tokenizer.ggml.pre` is split as GPT-2 splits text, with a warning. A file with repeated names or tensors
that overlap is refused.

**Gemma 4** has heads of two sizes. In E2B and E4B the last layers read the keys and values of earlier layers, which are
stored once. After the last layer with keys of its own, a pass drops the rows whose results no request reads. Each layer
of these models has an embedding table beside the first one: 2.3 billion numbers in E2B, of which a token reads 8,960.
The tables stay in the mapped file, or in the form of the GGUF file. Checkpoints with towers
(`Gemma4ForConditionalGeneration`) take text and [images](images.md#models); audio and video are refused. A GGUF file
may have its tower in a second file (`mmproj`). The 12B (`gemma4_unified`) and Gemma 3n with towers take text only.
Gemma 3n and 4 do not run with `tensor_parallel`, in int8 or layer by layer. llama.cpp computes the standard deviation
of Gemma 3n's gates with a divisor of n - 1; transformers and prefold divide by n.

**Latent attention** (MLA: DeepSeek, GLM-4.7-Flash, Youtu, MiniCPM 3, Mistral Small 4). What is kept of a row is its
latent and the rotated tail of its key. For GLM-4.7-Flash that is 54 KB a token in bfloat16; keys and values of all
heads would take 0.96 MB. There are two exact ways to attend. Embeddings, scores, labels and decisions are read from a
stream of rows, which expands the latents into the keys and values of all heads, once a step. While text is generated,
the native executor chooses the cheaper way for each query. The rows of a long prompt expand the keys that they share:
from about 250 rows a step on for GLM-4.7-Flash, and from 110 on for DeepSeek-V3. Rows that decode attend over the
latents themselves: the matrix that makes keys is multiplied into the query. With `invariant`, all rows of generation
attend over the latents, because a result must not depend on the other rows. Such models are not split over ranks and
not computed in int8. GGUF files of DeepSeek V2 and V3, GLM-4.7-Flash and Youtu are read (`deepseek2`).

## Checkpoints for embedding and reranking

Names, pooling and prompts are those of the checkpoints' own pages; their files were not at hand where this was written.
"""
WHY = """
Encoders (BERT, RoBERTa, ModernBERT, MPNet and what is made of them) let every token see what comes after it too, so
that no two texts share the computation of a prefix: they are refused, and other programs run them well. So are decoders
that were trained on to see in both directions.

| refused | architecture | because |
|---|---|---|
"""


def page() -> str:
    """Returns the text of docs/models.md."""
    load_plugins()  # features add families, and their names in GGUF files
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
    table = "\n| checkpoint | task | what it needs | architecture | run here |\n|---|---|---|---|---|\n"
    lines = (sorted(families), works, refused)
    parts = zip((HEAD, LONGROPE + table, WHY), lines, strict=True)
    return "".join(head + "\n".join(rows) + "\n" for head, rows in parts)


def _because(known: Known) -> str:
    settings = ", ".join(f"`{key}`: {str(value).lower()}" for key, value in known.settings)
    return f"it attends in {known.refused} ({settings})" if settings else f"it is {known.refused}"


if __name__ == "__main__":
    print(page(), end="")
