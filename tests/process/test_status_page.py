"""The status page in a browser: what it shows, what it keeps to itself, and what it costs."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.process.browser import CHROMIUM, browser
from tests.process.controlled import control
from tests.process.ensembles import ADD, write_ensemble
from tests.process.model_sources import answering
from tests.process.server import (
    running_server,
    send_request,
    wait_until,
    write_code_model,
    write_model,
)
from tests.process.test_status import fetch, infer

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>"
MANY = 129


@pytest.fixture(scope="module")
def chromium():
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    write_code_model(repository)
    write_model(repository, "add", ADD)
    write_model(repository, "fails", answering("raise ValueError('always')"))
    write_model(repository, "gone", ADD)
    write_ensemble(repository, "chain", "add IN=A > OUT=t", "add IN=t > OUT=B")
    with running_server(repository, "--allow-status-page-requests=true") as server:
        assert control(server, "unload", "gone") == (200, "")
        yield server


@pytest.fixture(scope="module")
def opened(server, chromium):
    """The page of the server, with its models; it may have said nothing in its console in the end."""
    made = chromium.open(f"http://{server.metrics_url}/")
    wait_for_models(made, 5)
    yield made
    assert made.faults() == []
    assert made.requests() == {f"http://{server.metrics_url}"}
    made.close()


@pytest.fixture
def page(opened):
    """That page, without a model chosen."""
    opened.press("Escape")
    opened.wait("document.getElementById('chosen').hidden", "no model")
    return opened


def wait_for_models(page, number):
    script = f"document.querySelectorAll('#models tbody tr').length === {number}"
    page.wait(script, f"{number} models")


def choose(page, name):
    page.run(f"location.hash = encodeURIComponent('{name}/1')")
    page.wait(f"document.querySelector('#chosen h2')?.textContent.startsWith('{name}')", name)


def shows(page, text, place="body"):
    page.wait(f"document.querySelector('{place}')?.innerText.includes({json.dumps(text)})", text)


def test_models_and_where_their_time_goes(server, page):
    for _ in range(5):
        infer(server, "chain", '{"inputs":[{"name":"A","datatype":"FP32","shape":[1],"data":[1]}]}')
    names = "[...document.querySelectorAll('#models .name a')].map(each => each.textContent)"
    assert sorted(page.run(names)) == ["add", "chain", "fails", "gone", "m"]
    shows(page, "ready", "#state")
    choose(page, "add")
    shows(page, "of the time.", "[data-part=verdict]")
    shows(page, "CPU", "[data-part=instances]")
    page.wait("document.querySelectorAll('[data-part=durations] rect').length > 0", "durations")
    choose(page, "chain")
    page.wait("document.querySelectorAll('[data-part=ensemble] rect.node').length === 4", "graph")
    shows(page, "waits", "[data-part=ensemble]")


def test_errors_and_restarts_are_shown_and_never_run(server, page):
    server.ask(f'raise ValueError("{HOSTILE}")')
    server.ask("sys.stderr.write('<b>last word</b>\\n'); os._exit(7)")
    wait_until(lambda: server.is_ready("m"), "another process", server)
    choose(page, "m")
    shows(page, HOSTILE, "[data-part=errors]")
    page.run("document.querySelectorAll('[data-part=errors] details').forEach(d => d.open = true)")
    shows(page, "model.py", "[data-part=errors]")
    shows(page, "exited with code 7", "[data-part=ends]")
    shows(page, "<b>last word</b>", "[data-part=ends]")
    shows(page, "exited with code 7", "#attention")
    assert page.run("document.title") == "gpubridge"
    assert page.run("document.querySelectorAll('img, b > b, script').length") == 1


def test_figures_say_which_time_and_processes_they_cover(server, page):
    request = '{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'
    assert server.request("POST", "/v2/models/fails/infer", request)[0] == 500
    shows(page, "all failed", "#models")
    covered = "show(); byId('covered').textContent"
    assert page.run("state.first = state.doc.time - 5; " + covered) == "so far 5 s"
    assert page.run("byId('window').value = '0'; " + covered) == ""
    # Processes are measured one after the other.
    page.wait("!byId('facts').innerText.includes('measured')", "memory of all processes")
    forget = "state.models.get('add/1').instances[0].memory = null; show(); "
    assert "2 of 3 processes measured" in page.run(forget + "byId('facts').innerText")
    page.run("byId('window').value = '60'; show()")


def test_figures_beside_each_other_agree(server, page):
    """What a page says of rates and durations, by documents that it is given."""
    assert send(server.metrics_url, {"Gpubridge-Page": "1"}, "fails")[0] == 500
    choose(page, "fails")
    shows(page, "All requests failed in this time.", "[data-part=durations]")
    shows(page, "All requests failed in this time.", "[data-part=verdict]")
    # Requests that fail are requests, in the trend, too.
    page.run(
        "const past = state.history.get('fails/1');"
        "const sums = failed => ({ ...past[0].s, success: 0, failures: { BACKEND: failed } });"
        "past.splice(0, past.length, ...[0, 0, 4, 4].map((n, i) => ({ t: i + 1, s: sums(n) }))); show()"
    )
    assert "at most 4" in page.run("panel.trend.innerText")
    choose(page, "gone")
    assert page.run("panel.trend.hidden || panel.trend.parentElement.hidden")
    # Of a model that was loaded within the time, no request is left out.
    done = page.run(
        "(() => { const now = state.doc.time, one = state.models.get('add/1').statistics;"
        "const sums = success => ({ ...one, since: now - 5, success });"
        "const history = [{ t: now - 3, s: sums(5) }, { t: now, s: sums(7) }];"
        "state.history.set('new/1', history);"
        "const did = figures({ key: 'new/1', statistics: history[1].s }, 60);"
        "state.history.delete('new/1'); return did.done })()"
    )
    assert done == 7
    last = "state.doc.duration_bounds_us.length"
    assert page.run(f"span(quantile([[3, 1], [{last}, 1]], 0.99))") == "> 100 s"
    assert page.run(f"span(quantile([[3, 1], [{last}, 1]], 0.5))") == "20 µs"


def test_the_past_is_shown_from_the_first_second(page):
    """The document of a server that has seen a model for some minutes, as a page that opens gets it."""
    step = {"success": 60, "failures": {"BACKEND": 60}, "durations": [[3, 60]], "execute_us": 600}
    told = page.run(
        "(() => { const doc = { ...state.doc, complete: false, models: [] }, now = doc.time;"
        "doc.server.started = now - 3600;"
        "const one = { ...state.models.get('fails/1').statistics, since: now - 3000 };"
        "Object.assign(one, { success: 1000, failures: { BACKEND: 500 }, durations: [[3, 1000]] });"
        f"const step = {json.dumps(step)};"
        "const steps = [400, 20].map(ago => ({ ...step, begin: now - ago - 10, end: now - ago }));"
        "const about = { name: 'fails', version: 1, since: one.since, sums: one, steps };"
        "state.models.get('fails/1').statistics = one; location.hash = 'fails%2F1';"
        "take({ ...doc, history: { begin: now - 900, models: [about] } }); follow();"
        "const did = seconds => figures(state.models.get('fails/1'), seconds);"
        "return [60, 900, 0].map(did).map(({ done, failed, time }) => [done, failed, Math.round(time)])"
        ".concat([byId('covered').textContent, panel.trend.innerText]) })()"
    )
    assert told[:4] == [[60, 60, 60], [120, 120, 900], [1000, 500, 3000], ""]
    assert "requests/s, at most 12" in told[4]
    assert "15 min ago" in told[4]
    page.run("state.heard = 0; state.number = 0")


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
PARTS = "queue 1.00 ms, upload 0 µs, execute 3.00 ms, download 0 µs, cache 0 µs, answer 0 µs"
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
        "Model|Request|At|Took|queue|upload|execute|download|cache|answer|",
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


def test_the_browser_refuses_texts_as_html(server, chromium):
    page = chromium.open(f"http://{server.metrics_url}/")
    wait_for_models(page, 5)
    refused = "try { document.body.innerHTML = '<p>'; 'taken' } catch (error) { error.name }"
    assert page.run(refused) == "TypeError"
    assert "TrustedHTML" in "".join(page.faults())
    page.close()


@pytest.mark.parametrize("width", [1400, 360])
def test_the_http_port_links_its_pages_and_calls_a_model(server, chromium, width):
    links = chromium.open(f"http://{server.http_url}/", width=width)
    links.wait("document.querySelectorAll('a').length === 6", "links")
    places = links.run("[...document.querySelectorAll('a')].map(each => each.href)")
    assert f"http://{server.metrics_url}/" in places
    assert f"http://{server.metrics_url}/metrics" in places
    calls = chromium.open(f"http://{server.http_url}/docs", width=width)
    first = "document.querySelector('#paths > details')"
    calls.wait(f"{first}?.innerText.includes('/v2/models/add/infer')", "a path")
    calls.run(f"{first}.open = true")
    calls.wait(f"!!{first}.querySelector('button')", "the form")
    calls.run(f"{first}.querySelector('button').click()")
    calls.wait(f"{first}.querySelector('pre').textContent.includes('\"outputs\"')", "an answer")
    for page in (links, calls):
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.faults() == []
        assert page.requests() == {f"http://{server.http_url}"}
        page.close()


def test_a_request_is_tried(server, page):
    choose(page, "add")
    page.wait("!!document.querySelector('[data-part=attempt] textarea')", "the form")
    page.run(
        "for (const [name, value] of [['input', '[2]'], ['textarea', '[41, 1]']]) {"
        " const field = document.querySelector('[data-part=attempt] ' + name);"
        " field.value = value; field.dispatchEvent(new Event('input')); }"
    )
    curl = page.run("document.querySelector('[data-curl]').textContent")
    assert curl == (
        """curl -d '{"inputs":[{"name":"IN","datatype":"FP32","shape":[2],"data":[41,1]}]}' """
        f"'http://{server.http_url}/v2/models/add/versions/1/infer'"
    )
    page.run("document.querySelector('[data-part=attempt] button').click()")
    shows(page, "200 in ", "[data-answer]")
    shows(page, '"data":[42.0,2.0]', "[data-answer]")


def test_requests_of_other_pages_are_refused(server):
    connection_headers = {"Content-Type": "text/plain", "Origin": "http://evil.example"}
    code, headers, body = send(server.metrics_url, connection_headers)
    assert code == 403
    assert b"got a request of a page from http://evil.example" in body
    assert not [name for name in headers if name.lower().startswith("access-control")]
    code, _, body = send(server.metrics_url, {"Content-Type": "text/plain"})
    assert code == 400
    assert b"only the status page" in body
    assert send(server.metrics_url, {"Gpubridge-Page": "1"})[0] == 200


def send(url, headers, model="add"):
    body = '{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'
    return send_request(url, "POST", f"/v2/models/{model}/infer", body, headers)


def test_keys(page):
    page.press("/")
    assert page.run("document.activeElement.id") == "filter"
    page.run("document.activeElement.blur()")
    page.press("j")
    page.wait("!document.getElementById('chosen').hidden", "the first model")
    first = page.run("location.hash")
    page.press("j")
    page.wait(f"location.hash !== {json.dumps(first)}", "the next model")
    page.press("Escape")
    page.wait("document.getElementById('chosen').hidden", "no model")


def test_light_and_dark(page):
    for scheme in ("dark", "light"):
        page.choose_scheme(scheme)
        picture = np.asarray(Image.open(io.BytesIO(page.picture())).convert("L"))
        assert (np.median(picture) < 60) == (scheme == "dark")
        assert (np.median(picture) > 200) == (scheme == "light")
        # Texts and lines are there.
        assert picture.std() > 5


def test_the_page_is_one_file_with_a_policy(server):
    code, headers, body = fetch(server.metrics_url, "/")
    assert code == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.findall(rb"(?:src|href)=\"(?!/|#|data:,)", body)
    assert b"innerHTML" not in body
    assert fetch(server.metrics_url, "/", {"Accept-Encoding": "gzip"})[2] != body


def test_reads_only_by_default(tmp_path, chromium):
    for name in ("add", "not_loaded"):
        write_model(tmp_path, name, ADD)
    with running_server(tmp_path) as server:
        assert control(server, "unload", "not_loaded")[0] == 200
        assert send(server.metrics_url, {"Gpubridge-Page": "1"})[0] == 404
        made = chromium.open(f"http://{server.metrics_url}/#add%2F1")
        made.wait("typeof state === 'object' && !!state.doc", "a document")
        # The server may list models of other tests.
        made.run("byId('filter').value = 'not_loaded'; show()")
        wait_for_models(made, 1)
        shows(made, "--allow-status-page-requests", "[data-part=attempt]")
        assert made.run("document.querySelector('[data-part=attempt] button').disabled")
        assert made.faults() == []
        made.close()


def test_more_models_than_a_page_shows(tmp_path, chromium):
    write_model(tmp_path, "add", ADD)
    for number in range(MANY):
        write_ensemble(tmp_path, f"chain_{number:03}", "add IN=A > OUT=B")
    with running_server(tmp_path, own=True) as server:
        made = chromium.open(f"http://{server.metrics_url}/")
        wait_for_models(made, 50)
        assert "page 1 of 3" in made.text()
        made.run("document.getElementById('next').click()")
        shows(made, "page 2 of 3")
        made.run(
            "const filter = document.getElementById('filter');"
            "filter.value = '_11'; filter.dispatchEvent(new Event('input'))"
        )
        wait_for_models(made, 10)
        assert "Models (10 of 130)" in made.text()
        assert made.faults() == []
        made.close()
