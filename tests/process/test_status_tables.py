"""The status page's tables, lines and advice, from documents that it is given."""

import json
import re

import pytest

from tests.process.browser import CHROMIUM, browser
from tests.process.ensembles import ADD
from tests.process.server import running_server, write_model
from tests.process.test_status_page import choose

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of a server with a model, ``add``."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "add", ADD)
    with running_server(repository) as server, browser() as chromium:
        made = chromium.open(f"http://{server.metrics_url}/")
        made.wait("typeof state === 'object' && !!state.models?.has('add/1')", "the model")
        yield made
        assert made.faults() == []


COUNTED = {
    "since": -100,
    "success": 200,
    "failures": {"BACKEND": 100},
    "durations": [[3, 200]],
    "batch_sizes": [[1, 50], [3, 50]],
    "copies": {"host": {"count": 400, "bytes": 1 << 20}},
    "request_us": 800_000,
    "queue_us": 200_000,
    "execute_us": 600_000,
    **dict.fromkeys(("input_us", "output_us", "cache_us", "answer_us"), 0),
}
"""Sums; what `KINDS` and the page's columns say of them follows by the columns' help texts."""
NONE = {"success": 0, "durations": [], "batch_sizes": [], "copies": {}}
INSTANCE = {"state": "ready", "ends": [], "restarts": 0, "memory": None}
PROCESSES = [
    {**INSTANCE, "memory": {"pss_bytes": 1 << 20}, "restarts": 2},
    {**INSTANCE, "memory": {"pss_bytes": 2 << 20}},
    INSTANCE,
]
OPEN = {"condition": "ready", "pending": 5, "queued": 3, "instances": PROCESSES}
IDLE = {**OPEN, "pending": 0, "queued": 0, "instances": []}
PARTS = "queue 1.00 ms, input 0 µs, execute 3.00 ms, output 0 µs, cache 0 µs, answer 0 µs"
TITLES = (
    *("Model", "State", "Requests/s", "p50", "p99", "Queue", "Where the time goes", "Batch"),
    *("Memory", "Restarts", "Failed", "Copies"),
)
NOTHING = ("–",) * 7
KINDS = {
    "served": (
        {**OPEN, "statistics": COUNTED, "version": 2},
        *("served v2", "ready", "3", "18 µs", "20 µs", "3 + 2", PARTS, "2", "3.00 MiB", "2"),
        *("100", "2 a request"),
    ),
    "ensemble": (
        {**IDLE, "statistics": {**COUNTED, "failures": {}, "batch_sizes": [[1, 200]]}},
        *(
            "ensemble",
            "ready",
            "2",
            "18 µs",
            "20 µs",
            "0",
            PARTS,
            "1",
            "–",
            "0",
            "0",
            "2 a request",
        ),
    ),
    "zero": (
        {**IDLE, "statistics": {**COUNTED, "copies": {}}},
        *("zero", "ready", "3", "18 µs", "20 µs", "0", PARTS, "2", "–", "0", "100", "zero-copy"),
    ),
    "failing": (
        {**IDLE, "condition": "restarting", "statistics": {**COUNTED, **NONE}},
        *("failing", "restarting", "1", "–", "–", "0", "all failed", "–", "–", "0", "100", ""),
    ),
    "unused": (
        {**IDLE, "statistics": {**COUNTED, **NONE, "failures": {}}},
        *("unused", "ready", "0", "–", "–", "0", "no requests", "–", "–", "0", "0", ""),
    ),
    "starting": ({"condition": "loading"}, "starting", "loading", *NOTHING, "0", "–", ""),
    "stopped": (
        {"condition": "unloaded", "reason": "unloaded"},
        *("stopped", "unloaded", *NOTHING, "0", "–", ""),
    ),
    "broken": (
        {"condition": "failed", "reason": "no such file"},
        *("broken", "failed", *NOTHING, "0", "–", ""),
    ),
}
"""Models as the status document has them, and what each column shows of them since their load."""


@pytest.mark.parametrize("name", KINDS)
def test_each_column_shows_what_its_help_says(page, name):
    model, *shown = KINDS[name]
    model = {"name": name, "version": 1, "key": name, **model}
    found = page.run(
        f"(() => {{ const model = {json.dumps(model)}, counted = model.statistics;"
        "if (counted) counted.since += state.doc.time;"
        "byId('window').value = '0'; describe(model); byId('window').value = '60';"
        "const text = each => each.textContent || each.firstChild?.title || '';"
        "return COLUMNS.map(([, title, help, , , cell]) => [title, help, text(h('td', null, cell(model)))]); })()"
    )
    assert [(title, said) for title, _, said in found] == list(zip(TITLES, shown, strict=True))
    headings = "[...document.querySelectorAll('#models th')].map(each => each.title)"
    assert page.run(headings) == [told for _, told, _ in found]
    assert all(told for _, told, _ in found)


DIED = "Stub process 'm_0' is not healthy. It exited with code 7."
REFUSED = f"Request for model 'm' cannot be served: {DIED}"
CALLED = "Failed to process the request(s) for model 'caller_0', message: "
ENDED = "2 times within the hour. It printed last: out of memory"
FULL = "Exceeds maximum queue size"


def died(state):
    end = {"time": -20, "reason": DIED, "output": ["out of memory"]}
    return {**INSTANCE, "name": "m_0", "state": state, "ends": [end, {**end, "time": -40}]}


def errors(*texts):
    return [{"text": text, "requests": 3, "last": -10} for text in texts]


BROKEN = {"condition": "failed", "reason": "ModuleNotFoundError: no such package"}
MEMBER = {"ensemble": {"steps": [{"model": "m"}], "edges": []}, "instances": []}
CAUSES = {
    "a dead process": (
        {
            "m": {
                "condition": "failed",
                "instances": [died("failed")],
                "errors": errors(DIED, REFUSED),
            },
            "caller": {"errors": errors(CALLED + REFUSED)},
            "ensemble": {"condition": "failed", **MEMBER, "errors": errors(DIED)},
        },
        f"failed|m {DIED} {ENDED} · 6 requests failed with it · also affects caller, ensemble",
    ),
    "one of two processes": (
        {"m": {"condition": "degraded", "instances": [died("restarting"), INSTANCE]}},
        f"degraded|m {DIED} {ENDED}",
    ),
    "a process that runs again": (
        {"m": {"instances": [died("ready")], "errors": errors("another")}},
        f"restarted 20 s ago|m {DIED} {ENDED}",
        "3 requests failed, 10 s ago|m another",
    ),
    "a model that is not loaded": (
        {
            "m": BROKEN,
            "ensemble": {**BROKEN, "reason": "ensemble 'ensemble' depends on 'm' which has no"},
        },
        "failed|m ModuleNotFoundError: no such package · also affects ensemble",
    ),
    "two models with the same error": (
        {"m": {"errors": errors(FULL, "another")}, "n": {"errors": errors(FULL)}},
        f"3 requests failed, 10 s ago|m {FULL} · and 1 other error",
        f"3 requests failed, 10 s ago|n {FULL}",
    ),
}
"""Models of the status document, and the lines that say what needs attention: one for each cause."""


@pytest.mark.parametrize("case", CAUSES)
def test_one_line_for_each_cause(page, case):
    given, *lines = CAUSES[case]
    common = {"version": 1, "condition": "ready", "instances": [], "errors": [], "queued": 0}
    models = [{"name": name, "key": name, **common, **model} for name, model in given.items()]
    script = """(() => {
        const kept = new Map(state.models), ready = state.doc.server.ready, now = state.doc.time;
        state.models.clear();
        for (const model of given) {
            for (const end of model.instances.flatMap(each => each.ends)) end.time += now;
            for (const error of model.errors) error.last += now;
            state.models.set(model.key, model);
        }
        state.doc.server.ready = false; show();
        const lines = [...document.querySelectorAll('#attention li')].map(
            each => [...each.children].map(part => part.textContent).join('|'));
        const header = byId('state').textContent;
        state.models.clear(); for (const [key, model] of kept) state.models.set(key, model);
        state.doc.server.ready = ready; show();
        return [header, lines] })()"""
    header, found = page.run(script.replace("given", json.dumps(models), 1))
    assert found == list(lines)
    words = [model["condition"] for model in models]
    told = [
        f"{words.count(word)} of {len(words)} model{'s' * (len(words) > 1)} failed"
        for word in ("failed",)
        if word in words
    ]
    assert header == ": ".join(["not ready", *told])


def test_a_cell_follows_all_that_it_shows(page):
    model = {"name": "new", "version": 1, "key": "new", **KINDS["served"][0]}
    said = page.run(
        f"(() => {{ const model = {json.dumps(model)}, said = []; model.statistics.since += state.doc.time;"
        "byId('window').value = '0'; state.models.set('new', model);"
        "for (const done of [200, 400]) { model.statistics = { ...model.statistics, success: done }; show();"
        " said.push(tableRows.get('new').cells[COLUMNS.length - 1].textContent); }"
        "state.models.delete('new'); byId('window').value = '60'; show(); return said; })()"
    )
    assert said == ["2 a request", "1 a request"]


INSTANCES = (
    "Instance|State|Process|Python|Device|Memory (PSS)|RSS|GPU memory|In flight|Executing for|Started"
    "|Restarts"
)
PROCESS = {
    "name": "add_0",
    "state": "ready",
    "pid": 7,
    "python": "3.11",
    "device": 1,
    "memory": {"pss_bytes": 1 << 20, "rss_bytes": 2 << 20},
    "device_memory_bytes": 3 << 20,
    "in_flight": 2,
    "executing_us": 3_000_000,
    "started": -10,
    "restarts": 4,
}
SLOW = {"model": "m", "version": 1, "id": "r", "time": 0, "request_us": 21, "queue_us": 0}
SLOW |= {"input_us": 1, "execute_us": 2, "output_us": 3, "cache_us": 4, "answer_us": 5}
TABLES = {
    "instances": (
        [PROCESS, {**dict.fromkeys(PROCESS), "name": "add_1", "state": "starting", "in_flight": 0}],
        """given[0].started += state.doc.time; showInstances({ instances: given });
        const table = panel.instances;""",
        INSTANCES,
        "add_0|ready|7|3.11|GPU 1|1.00 MiB|2.00 MiB|3.00 MiB|2|3.00 s|10 s ago|4",
        "add_1|starting|–|–|CPU|–|–|–|0|–|–|0",
    ),
    "slowest": (
        [SLOW],
        """const table = slowTable(given, true), cell = table.querySelector('tbody').rows[0].cells[2];
        cell.textContent = cell.textContent === clock(0);""",
        "Model|Request|At|Took|queue|input|execute|output|cache|answer|",
        "m|r|true|21 µs|0 µs|1 µs|2 µs|3 µs|4 µs|5 µs|",
    ),
    "regions": (
        [
            {"name": "host", "key": "/a", "offset": 8, "byte_size": 1024, "uses": 3},
            {"name": "gpu", "device_id": 1, "byte_size": 2048, "uses": 0},
        ],
        """state.doc.regions = given; showServer([]); state.doc.regions = [];
        const table = document.querySelector('section[aria-label^=clients]');""",
        "Region|Where|Size|In use by",
        "host|/dev/shm/a + 8|1.00 KiB|3 requests",
        "gpu|GPU 1|2.00 KiB|0 requests",
    ),
}
"""The other tables: rows as in the status document, how they are shown, their titles and texts."""


@pytest.mark.parametrize("name", TABLES)
def test_each_column_of_the_other_tables_shows_its_field(page, name):
    given, made, *expected = TABLES[name]
    choose(page, "add")
    made = f"(() => {{ const given = {json.dumps(given)}; {made}"
    read = (
        "[...table.querySelectorAll('tr')].map(row => [...row.cells].map(each => each.textContent))"
    )
    assert page.run(f"{made} return {read} }})()") == [row.split("|") for row in expected]


ADVICE = {
    "dynamic_batching {}, so each is executed alone, although max_batch_size is 8": {},
    "has no max_batch_size": {"max_batch_size": 0},
    "(2 of 8): in config.pbtxt instance_group [{ count: 3 }]": {"scheduler": "dynamic_batching"},
    "Batches are full (2 of 2)": {"scheduler": "dynamic_batching", "max_batch_size": 2},
    "instance_group [{ count: 3 }] starts one more for other": {"scheduler": "sequence_batching"},
}
"""What the page advises for requests that wait, and the configuration of the model."""


ANSWERING = {
    "name": "called", "version": 1, "key": "called/1", "max_batch_size": 8, "scheduler": "",
    "instances": [1], "did": {"done": 9, "batch": 1, "parts": [5, 0, 3, 0, 0, 0]},
}  # fmt: skip
CALL = {"model": "called", "version": 1, "count": 4, "call_us": 80}
CALLER = {"key": "m/1", "instances": [1], "statistics": {"execute_us": 100, "success": 2}}
NEEDS = {
    "queue": {"calls": [{**CALL, "model": "other", "call_us": 10}, CALL]},
    "execute": {
        "calls": [],
        "ensemble": {"steps": [{"model": "called", "version": None, "step_us": 80}]},
    },
}


@pytest.mark.parametrize("part", NEEDS)
def test_advice_is_that_of_the_model_that_takes_the_time(page, part):
    model = json.dumps({**CALLER, **NEEDS[part]})
    told = page.run(
        f"(() => {{ state.models.set('called/1', {json.dumps(ANSWERING)});"
        f"const told = advice({model}, null, '{part}'); state.models.delete('called/1'); return told }})()"
    )
    assert re.search("80 % of its execute (is its step|are its calls of) called[.]", told)
    assert told.endswith(
        "config.pbtxt lacks dynamic_batching {}, so each is executed alone, although max_batch_size is 8."
    )
    alone = {**CALLER, "calls": [{**CALL, "call_us": 40}]}
    assert page.run(f"advice({json.dumps(alone)}, null, 'execute')") == page.run("HINTS.execute")


def test_called_models_are_drawn_with_their_part_of_execute(page):
    choose(page, "add")
    model = {**CALLER, "name": "m", "calls": [{**CALL, "model": "other", "call_us": 12}, CALL]}
    texts = page.run(
        f"(() => {{ showGraph({json.dumps(model)});"
        "return [...panel.ensemble.querySelectorAll('text')].map(each => each.textContent) })()"
    )
    assert sorted(texts) == sorted(
        [
            "m",
            "50 µs in execute",
            "other",
            "3 µs, 4 calls",
            "12 %",
            "called",
            "20 µs, 4 calls",
            "80 %",
        ]
    )
    page.run("location.hash = ''")


@pytest.mark.parametrize(("text", "given"), [(text, ADVICE[text]) for text in ADVICE])
def test_advice_names_the_line_of_the_configuration(page, text, given):
    model = {"max_batch_size": 8, "scheduler": "", "instances": [1, 2], "did": {"batch": 2}}
    assert text in page.run(f"queueAdvice({json.dumps(model | given)})")
