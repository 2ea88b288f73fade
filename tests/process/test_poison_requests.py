"""A request that kills its model's process, sent again and again, denies the model to no other client."""

import re
import threading

import pytest

from tests.process.server import NO_SPARES, alive, running_server, wait_until, write_code_model

POISON = "os._exit(1)"
ROUNDS = 10
SPARE = "--backend-config=python,spare-stub-seconds=3"


def waits(server):
    """Return the back-offs before the starts of processes so far."""
    return [float(s) for s in re.findall(r"restarts in (\S+) s", server.log())]


def poison(server, rounds):
    for _ in range(rounds):
        status, error = server.ask(POISON)
        assert (status, "It exited with code 1." in error) == (503, True), error


@pytest.mark.parametrize("count", [1, 2])
def test_honest_requests_are_answered_while_others_kill_their_processes(tmp_path, count):
    write_code_model(
        tmp_path,
        initialize="time.sleep(0.1)",
        config=f"instance_group [{{ count: {count} }}]",
    )
    with running_server(tmp_path) as server:
        ended = threading.Event()
        answers = []

        def ask_honestly():
            while not ended.is_set():
                answers.append(server.ask("self.said = 'well'"))

        clients = [threading.Thread(target=ask_honestly) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            poison(server, ROUNDS)
        finally:
            ended.set()
            for client in clients:
                client.join()
        assert set(answers) == {(200, "well")}
        # There were good answers between the deaths, most often.
        assert max(waits(server), default=0.0) <= 0.2
        assert "is ready again, on its replacement process" in server.log()


def test_the_back_off_grows_with_deaths_in_a_row_and_ends_with_a_good_answer(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path, *NO_SPARES) as server:
        poison(server, 3)
        # Its requests wait while that is short.
        assert server.ask("self.said = 'well'") == (200, "well")
        assert waits(server) == [0.1, 0.2]
        poison(server, 1)
        assert server.ask("self.said = 'well'") == (200, "well")
        assert waits(server) == [0.1, 0.2]


def test_a_spare_process_is_one_is_ended_after_a_while_and_with_its_model(tmp_path):
    write_code_model(tmp_path, config="instance_group [{ count: 3 }]")
    with running_server(tmp_path, SPARE) as server:
        first = set(server.stubs())
        assert len(first) == 3
        poison(server, 1)
        assert server.ask("self.said = 'well'") == (200, "well")
        poison(server, 5)
        wait_until(lambda: len(server.stubs()) == 4, "a spare process", server)
        assert "Finalize" not in server.log()
        wait_until(lambda: "Finalize" in server.log(), "the spare process to end", server)
        wait_until(lambda: len(server.stubs()) == 3, "it to be gone", server)
        poison(server, 6)
        wait_until(lambda: len(server.stubs()) == 4, "another spare process", server)
        stubs = server.stubs()
        assert server.request("POST", "/v2/repository/models/m/unload")[0] == 200
        wait_until(lambda: not any(map(alive, stubs)), "all of them to end", server)


@pytest.mark.parametrize("block", ["fcntl.LOCK_NB", "0"])
def test_a_model_that_cannot_be_there_twice_is_served(tmp_path, block):
    """The second one fails to start, or waits until the first has ended."""
    alone = tmp_path / "alone"
    write_code_model(
        tmp_path / "models",
        initialize=f"""
self.lock = open({str(alone)!r}, "a")
fcntl.flock(self.lock, fcntl.LOCK_EX | {block})
""",
    )
    model = tmp_path / "models" / "m" / "1" / "model.py"
    model.write_text("import fcntl\n" + model.read_text())
    with running_server(tmp_path / "models", SPARE) as server:
        for _ in range(2):
            poison(server, 1)
            assert server.ask("self.said = 'well'") == (200, "well")
