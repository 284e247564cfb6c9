import copy
import functools
import gc
import itertools
import os
import random
import re
import signal
import ssl
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch starts its threads, here and in the processes that tests begin: the models are tiny, and threads steal
# the time of those that work when tests run side by side. What more threads change has tests of its own.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The processes that tests begin need not compile prefold anew, each for itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Triton decides when it is imported whether it compiles for a GPU, or interprets its kernels on a CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Helpers of more than one folder of tests (`from tiny import ...`). Those of one folder lie beside its tests; pytest
# puts the folder of each test on the path. `tests/record` alone is a package, because it is run by `python -m`.
sys.path.insert(0, str(Path(__file__).parent / "support"))

# A process that was begun in the background ignores these signals, and so would those that tests begin and stop.
for name in ("SIGINT", "SIGHUP"):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), lambda *_: None)

# Reading all certificates takes a client of HTTP ten times as long as a request, and no test speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# The same examples in each run and on each machine, however slow or busy it is. --hypothesis-profile=default draws
# others, and keeps those that fail.
same = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("default", **same)
settings.register_profile("prefold", derandomize=True, **same)
settings.load_profile("prefold")
FEW = 12  # examples of a property test in a quick run, where it asks for at most eight times as many


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="draw the order of modules, and of the tests of each")


# Layers of the tests. A file's own entry counts before that of its folder. `unit` tests need neither torch nor another
# process, and take few seconds a file: `scripts/check` runs them, and imports no other file.
LAYERS = {
    "unit": """
        checkpoint engine/cache engine/schedule jobs tasks text trie wire
        cluster/test_block_events.py cluster/test_dispatch.py cluster/test_leases.py cluster/test_router.py
        engine/test_handles.py
        features/hybrid/test_state_books.py features/images/test_media_table.py
        features/looped/test_routed_scheduler.py features/shifted/test_shifting.py
        test_concepts.py test_errors.py test_figures.py test_messages.py test_names.py test_pages.py
    """,
    "model": """
        api benchmarks cli engine features integrations kernels model record train worker
        features/images/test_pixels.py
        test_blocks.py test_deploy.py test_device.py test_extend.py test_examples.py
        test_imports.py test_invariant.py test_llm.py test_llm_generate.py test_markers.py test_setup.py
        test_task_options.py test_types.py test_models_without_torch.py test_bare_environment.py
        checkpoint/test_resolve.py checkpoint/test_stored.py
        engine/schedule/test_window_planner.py engine/schedule/test_steps.py
        jobs/test_live_jobs.py jobs/test_output.py jobs/test_plan.py jobs/test_run.py
        tasks/test_decide.py tasks/test_make_task.py tasks/test_rerank_task.py
        tasks/test_score_task.py tasks/test_sentence_transformers.py
        text/test_broken_files.py text/test_chat.py text/test_grammar_real.py text/test_model_templates.py
        text/test_sentencepiece.py text/test_template_process.py text/test_tokenizer.py
        trie/test_fold_tensors.py trie/test_spool.py
    """,
    "server": "serve",
    "cluster": "cluster",
}
PLACES = {place: layer for layer, places in LAYERS.items() for place in places.split()}


def layer_of(path):
    """Returns the layer of a test file."""
    place = path.relative_to(Path(__file__).parent)
    for each in (place, *place.parents):
        if each.as_posix() in PLACES:
            return PLACES[each.as_posix()]
    raise pytest.UsageError(f"tests/{place} has no layer: add it, or its folder, to LAYERS in tests/conftest.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay to the end: the garbage collector need not look through them, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path, config):
    # Only the files of unit tests are imported where these tests alone are asked for: others import torch.
    if config.option.markexpr.startswith("unit") and collection_path.match("test_*.py"):
        return layer_of(collection_path) != "unit" or None
    return None


def pytest_collection_modifyitems(config, items):
    combinations = {}
    for item in items:
        item.add_marker(layer_of(item.path))
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            combinations.setdefault((item.path, item.originalname), []).append(item)
    for same_test in combinations.values():
        mark_repetitions(same_test)
    thin_properties(items, quick="not slow" in config.option.markexpr)
    seed = config.getoption("--shuffle")
    if seed is not None:
        draw = random.Random(seed)
        places = {item.path: draw.random() for item in items}
        items.sort(key=lambda item: (places[item.path], draw.random()))


def mark_repetitions(items):
    """Of a test's combinations of three or more parameters, marks those as slow in which no two values meet that have
    not met before; the combination that shows most comes first. The marker `covering(1)` asks for each value only."""
    marker = items[0].get_closest_marker("covering")
    if marker is None and len(parameters_of(items[0])) < 3:
        return
    together = 2 if marker is None else marker.args[0]
    shown = {item: set(itertools.combinations(parameters_of(item), together)) for item in items}
    while shown:
        best = max(shown, key=lambda item: len(shown[item]))
        seen = shown.pop(best)
        if not seen:
            best.add_marker("slow")
        for left in shown.values():
            left -= seen


def parameters_of(item):
    """Returns the names of each parameter of a test and which value it has; names of one `parametrize` are one."""
    values = item.callspec.params
    marks = [marker.args[0] for marker in item.iter_markers("parametrize")]
    names = [tuple(re.findall(r"\w+", mark)) if isinstance(mark, str) else tuple(mark) for mark in marks]
    names += [(name,) for name in values.keys() - set(itertools.chain(*names))]
    return sorted((group, tuple(id(values[name]) for name in group)) for group in names)


def thin_properties(items, quick):
    """A quick run draws an eighth of the examples that a property test asks for; `-m slow` runs it with all of them."""
    functions = {}
    for item in items:
        own = getattr(item.obj, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > FEW:
            functions[item.obj] = own
            if not quick:
                item.add_marker("slow")
    if quick:
        for function, own in functions.items():
            function._hypothesis_internal_use_settings = settings(own, max_examples=max(FEW, own.max_examples // 8))


def pytest_terminal_summary(terminalreporter, config):
    """Tells how long the tests of each layer took, added over all processes."""
    seconds, counts = {}, {}
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if hasattr(report, "duration"):
            layer = layer_of(Path(config.rootpath, report.nodeid.partition("::")[0]))
            seconds[layer] = seconds.get(layer, 0.0) + report.duration
            counts[layer] = counts.get(layer, 0) + (report.when == "call")
    if len(seconds) > 1:
        parts = (f"{layer} {seconds[layer]:.0f} s ({counts[layer]:,} tests)" for layer in LAYERS if layer in seconds)
        terminalreporter.write_line("seconds of the layers: " + ", ".join(parts))


@pytest.fixture(autouse=True, scope="session")
def small_machine(request):
    """What more threads change has tests of its own. The K/V of tiny models has room in little memory, and with 4 GiB
    the arrays that have an entry for each slot would take longer to make than a test takes."""
    if any(item.get_closest_marker("unit") is None for item in request.session.items):
        from prefold.worker.torch import worker as local
        from prefold.worker.torch.device import settle_threads

        settle_threads(1)
        local.KV_MOST_ON_CPU = 1 << 26


@pytest.fixture(autouse=True)
def same_draws(request):
    """What a test draws at random does not depend on the tests before it. Unit tests draw nothing with torch: where
    they run alone, a test that imports it fails."""
    if request.node.get_closest_marker("unit") is None:
        import torch

        torch.manual_seed(0)
        yield
    else:
        before = "torch" in sys.modules
        yield
        if not before and "torch" in sys.modules:
            pytest.fail("This unit test imports torch: give its file another layer in tests/conftest.py.")


@pytest.fixture
def keep(request):
    """Lets tables of prefold (dictionaries, sets or lists) have at the end of the test what they have now."""

    def one(table, before):
        table.clear()
        (table.extend if isinstance(table, list) else table.update)(before)

    def all_of(*tables):
        for table in tables:
            request.addfinalizer(functools.partial(one, table, copy.copy(table)))

    return all_of


@pytest.fixture
def no_kernels():
    """A process without compiled kernels."""
    from machines import kernels_in_use

    with kernels_in_use(None):
        yield


@pytest.fixture
def compiled(request):
    """Whether the process has compiled kernels: a parameter of the test (`indirect=True`)."""
    from machines import kernels_in_use

    from prefold import kernels

    with kernels_in_use(kernels.load() if request.param else None):
        yield request.param


@pytest.fixture
def control_groups(tmp_path, monkeypatch):
    """A folder that stands for the control groups of the system: without limits, until a test writes some there. The
    file `own` names those of this process."""
    from prefold.spec import container

    folder = tmp_path / "control-groups"
    folder.mkdir()
    monkeypatch.setattr(container, "CGROUP", folder)
    monkeypatch.setattr(container, "OWN_GROUPS", folder / "own")
    return folder


@pytest.fixture
def free_memory(control_groups):
    """Lets the system have so many bytes of memory free, which must not be more than are free."""

    def free(size):
        for name, text in (("memory.max", str(size)), ("memory.current", "0"), ("memory.stat", "")):
            (control_groups / name).write_text(text)

    return free


@pytest.fixture
def start_by(monkeypatch):
    """Lets a function start the steps of a worker until the test ends. It is called with the worker's own `start`, the
    message, and what was prepared."""

    def put(worker, function):
        monkeypatch.setattr(worker, "start", functools.partial(function, worker.start))

    return put


@pytest.fixture
def slow_steps(start_by):
    """Lets every step of a worker take these seconds more."""

    def slow(worker, seconds):
        start_by(worker, lambda start, *given: time.sleep(seconds) or start(*given))

    return slow


@pytest.fixture
def own_products(multiply_by):
    """Lets the kernels multiply on every machine, also where PyTorch does it faster."""
    from prefold import kernels
    from prefold.worker.torch.products import can_pack

    if kernels.load() is None:
        pytest.skip("there is no compiler")
    multiply_by(lambda weight: kernels.load() if can_pack(weight) else None)


@pytest.fixture
def multiply_by(monkeypatch):
    """Lets a function choose the kernels that multiply by a weight, in place of what is faster here."""

    def choose(function):
        monkeypatch.setattr("prefold.worker.torch.products.product_kernels", function)

    return choose


@pytest.fixture
def rows_of_logits(monkeypatch):
    """Lets a model note of how many rows it makes logits, in the list that is returned."""

    def noted(model):
        rows, logits = [], model.logits
        monkeypatch.setattr(model, "logits", lambda hidden, *more: rows.append(len(hidden)) or logits(hidden, *more))
        return rows

    return noted


@pytest.fixture
def fsync_by(monkeypatch):
    """Lets a function put files to disk. It is called with the system's `fsync`, and the descriptor."""
    return lambda function: monkeypatch.setattr(os, "fsync", functools.partial(function, os.fsync))


@pytest.fixture
def argv(monkeypatch):
    """Lets the process have these words as its command line."""
    return lambda *words: monkeypatch.setattr(sys, "argv", [str(word) for word in words])
