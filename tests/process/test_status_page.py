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
    assert (
        page.run("state.doc.server.started = 0; state.first = state.doc.time - 5; " + covered)
        == "so far 5 s"
    )
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


def test_each_figure_and_heading_has_a_tooltip(server, page):
    infer(server, "add", '{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}')
    choose(page, "add")
    page.wait("document.querySelectorAll('#chosen .big > div').length === 12", "figures")
    bare = "[...document.querySelectorAll('th, .big > div, #legend > span, [data-part=copies] b')]"
    bare += (
        ".filter(each => !(each.title || each.parentElement.title)).map(each => each.textContent)"
    )
    assert page.run(bare) == []
    helps = page.run("JSON.stringify([PART_HELP, COLUMNS.map(([, , help]) => help)])")
    named = set(re.findall(r"(?:nv|gpubridge)_\w+", helps))
    page.run("location.hash = ''")
    text = fetch(server.metrics_url, "/metrics")[2].decode()
    assert {name for name in named if f"# HELP {name} " not in text} <= {
        "nv_cache_hit_duration_per_model",  # Without a cache it is not there.
    }


def test_a_phone_shows_all_columns(server, chromium):
    infer(server, "chain", '{"inputs":[{"name":"A","datatype":"FP32","shape":[1],"data":[1]}]}')
    made = chromium.open(f"http://{server.metrics_url}/#chain%2F1", width=390, height=844)
    made.wait("typeof state === 'object' && !!document.querySelector('.ground')", "the graph")
    assert made.run("document.documentElement.scrollWidth") <= 390
    outside = """[...document.querySelectorAll('td, .attention li > *, .fact')].filter(each => {
        const { left, right, width } = each.getBoundingClientRect();
        return left < 0 || right > innerWidth || !width }).map(each => each.textContent)"""
    assert made.run(outside) == []
    titles = "[...tableRows.get('add/1').cells].map(each => each.dataset.title)"
    assert made.run(titles) == made.run("COLUMNS.map(([, title]) => title)")
    # Labels of the graph are above all its lines.
    kinds = made.run(
        "[...document.querySelectorAll('[data-part=ensemble] svg > *')].map(each => each.classList[0])"
    )
    assert kinds.index("dim") > max(i for i, kind in enumerate(kinds) if kind == "edge")
    made.close()


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
