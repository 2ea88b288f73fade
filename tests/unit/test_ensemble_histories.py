"""Histories of loads, unloads, replacements and requests of ensembles, against a model of who answers."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError
from gpubridge.request import InferResponse
from tests.unit.ensembles import ensemble, member
from tests.unit.repositories import ClientRequest, make_repository

PLAIN = ("a", "b", "c")
ENSEMBLES = ("e", "f", "g")
KINDS = {
    "usual": {},
    "decoupled": {"decoupled": True},
    "other type": {"outputs": "Y:INT32[-1]"},
    "other input": {"inputs": "Z"},
}
"""What a plain model may be changed to; ensembles take the first two."""


class Expected:
    """The model: what the files say, what is loaded, and so who answers whom.

    - ``files``: by name, of a plain model its kind, versions and whether it fails; of an ensemble its
      steps, each a model and a version.
    - ``plain``: the served versions of plain models: kind, and the object that answers, by number.
    - ``ensembles``: what each loaded ensemble was loaded as, the latest last; only one that is served may
      have another after it, which waits.
    - ``asked``: models that were loaded by name; a load that fails counts for an ensemble, which waits.
    """

    def __init__(self, files):
        self.files = files
        self.plain = {}
        self.ensembles = {}
        self.asked = set()

    def answering(self, name):
        """Return the kind of each step of a served ensemble and who answers it, in order; or None."""
        found = [self._on_members(steps) for steps in self.ensembles.get(name, ())]
        return next((each for each in reversed(found) if each is not None), None)

    def _on_members(self, steps):
        answering = []
        for name, version in steps:
            if name in ENSEMBLES:
                inner = self.answering(name)
                if inner is None or version not in (None, 1):
                    return None
                answering += inner
                continue
            versions = self.plain.get(name, {})
            number = version or max(versions, default=None)
            if number not in versions or versions[number][0] not in ("usual", "decoupled"):
                return None
            answering.append(versions[number])
        return answering

    def settle(self):
        """Forget what was replaced by what could be served."""
        for loaded in self.ensembles.values():
            if len(loaded) > 1 and self._on_members(loaded[-1]) is not None:
                del loaded[:-1]

    def load(self, name, made):
        """Load a model, and the members that it lacks; ``made``: takes the objects that a load makes."""
        if name in ENSEMBLES or not self.files[name][2]:
            self.asked.add(name)
        self._load(name, made)

    def _load(self, name, made):
        content = self.files[name]
        if name in PLAIN:
            kind, versions, fails = content
            unchanged = {v: self.plain.get(name, {}).get(v) for v in versions}
            objects = made(name)
            if not fails:
                self.plain[name] = {
                    v: (kind, objects[v]) if v in objects else unchanged[v] for v in versions
                }
            return
        served = self.ensembles[name][:1] if self.answering(name) is not None else []
        self.ensembles[name] = [*served, content]
        self.settle()
        self._load_members(name, made)

    def _load_members(self, name, made):
        for each in sorted({model for model, _ in self.ensembles[name][-1]}):
            if each not in self.plain and each not in self.ensembles:
                self._load(each, made)
            elif each in ENSEMBLES and self.answering(each) is None:
                self._load_members(each, made)
            self.settle()

    def unload(self, name, dependents):
        loaded = self.ensembles.get(name, ())
        self.plain.pop(name, None)
        self.ensembles.pop(name, None)
        self.asked.discard(name)
        if dependents:
            self._unload_unneeded({model for steps in loaded for model, _ in steps})

    def _unload_unneeded(self, names):
        for name in sorted(names):
            needed = {m for loaded in self.ensembles.values() for s in loaded for m, _ in s}
            if name not in needed and name not in self.asked:
                self.unload(name, dependents=True)


class History:
    """A repository, the model of it, and the requests under way."""

    def __init__(self, repository, loader):
        self.repository = repository
        self.loader = loader
        self.expected = Expected(dict.fromkeys(PLAIN, ("usual", (1,), False)))
        self.requests = []
        self._seen = 0

    def change(self, name, content):
        """Change the files of a model."""
        self.expected.files[name] = content
        if name in PLAIN:
            kind, versions, fails = content
            failure = "it is broken" if fails else ""
            self.loader.change(name, member(name, **KINDS[kind]), versions, failure)
        else:
            self.loader.change(name, steps_of(name, content))

    async def load(self, name):
        try:
            await self.repository.load(name)
        except BridgeError as error:
            failed = error
        else:
            failed = None
        made = self.loader.made[self._seen :]
        self._seen = len(self.loader.made)

        def made_of(name):
            return {each.version: each for each in made if each.name == name}

        self.expected.load(name, made_of)
        if name in ENSEMBLES:
            loaded = self.expected.ensembles[name]
            is_served = len(loaded) == 1 and self.expected.answering(name) is not None
        else:
            is_served = not self.expected.files[name][2]
        assert (failed is None) == is_served

    async def unload(self, name, dependents):
        await self.repository.unload(name, dependents=dependents)
        self.expected.unload(name, dependents)

    def check(self):
        """Compare what is served, and as what."""
        for name in PLAIN:
            versions = {v: each for v, (_, each) in self.expected.plain.get(name, {}).items()}
            assert self.repository.versions(name) == sorted(versions)
            for version, each in versions.items():
                assert self.repository.find(name, version) is each
                assert not each.unloaded.is_set()
        for name in ENSEMBLES:
            answering = self.expected.answering(name)
            assert self.repository.versions(name) == ([] if answering is None else [1])
            if answering is not None:
                kinds = [kind for kind, _ in answering]
                model = self.repository.find(name, None)
                assert model.config.decoupled == ("decoupled" in kinds)
                assert model.ready

    def ask(self, name):
        """Begin a request, if the model serves the ensemble."""
        answering = self.expected.answering(name)
        if answering is not None:
            members = [each for _, each in answering]
            request = ClientRequest(self.repository.find(name, None), f"r{len(self.requests)}")
            self.requests.append((request, members))

    def answer(self, number):
        """Answer the waiting request of a member, once more than once if that is decoupled."""
        waiting = [(each, one) for each in self.loader.made for one in each.held]
        if not waiting:
            return False
        each, one = waiting[number % len(waiting)]
        if each.config.decoupled and number % 2:
            each.respond(one)
        else:
            each.answer(one)
        return True

    async def end(self):
        """Answer everything; see that each request met its members, and that the others are gone."""
        while self.answer(0):
            pass
        met = {}
        for each in self.loader.made:
            for identifier in each.received:
                met.setdefault(identifier, set()).add(each)
        for number, (request, members) in enumerate(self.requests):
            assert request.over
            assert request.outcomes
            assert all(isinstance(outcome, InferResponse) for outcome in request.outcomes)
            assert met[f"r{number}"] == set(members)
        served = {
            each for versions in self.expected.plain.values() for _, each in versions.values()
        }
        for each in self.loader.made:
            if each not in served and not each.failure:
                await each.unloaded.wait()
        await self.repository.close(3600.0)


def steps_of(name, steps):
    """Return the configuration of an ensemble of steps that follow each other."""
    words = []
    for index, (model, version) in enumerate(steps):
        before = f"t{index}" if index else "A"
        after = f"t{index + 1}" if index + 1 < len(steps) else "B"
        ends = ("A", "B") if model in ENSEMBLES else ("X", "Y")
        pinned = f":{version}" if version else ""
        words.append(f"{model}{pinned} {ends[0]}={before} > {ends[1]}={after}")
    return ensemble(*words, name=name)


# An ensemble requires those before it only; see test_ensembles_under_change.py for circles.
members = {
    name: st.sampled_from([*PLAIN, *ENSEMBLES[:index]]) for index, name in enumerate(ENSEMBLES)
}
contents = st.one_of(
    *(
        st.tuples(
            st.just(name),
            st.tuples(
                st.sampled_from(["usual", "usual", *KINDS]),
                st.sampled_from([(1,), (1,), (2,), (1, 2)]),
                st.sampled_from([False, False, False, True]),
            ),
        )
        for name in PLAIN
    ),
    *(
        st.tuples(
            st.just(name),
            st.lists(
                st.tuples(members[name], st.sampled_from([None, None, 1, 2])),
                min_size=1,
                max_size=3,
            ),
        )
        for name in ENSEMBLES
    ),
)
names = st.sampled_from([*PLAIN, *ENSEMBLES])
events = st.one_of(
    st.tuples(st.just("change"), contents),
    st.tuples(st.just("change and load"), contents),
    st.tuples(st.just("load"), names),
    st.tuples(st.just("unload"), names, st.booleans()),
    st.tuples(st.just("ask"), st.sampled_from(ENSEMBLES)),
    st.tuples(st.just("ask"), st.sampled_from(ENSEMBLES)),
    st.tuples(st.just("answer"), st.integers(0, 20)),
)
INITIAL = {"e": [("a", None), ("b", None)], "f": [("e", None), ("c", 1)], "g": [("f", None)]}


@given(st.lists(events, max_size=40))
def test_each_request_is_answered_by_the_members_that_were_served_when_it_began(history):
    async def play(folder):
        models = [*map(member, PLAIN), *(steps_of(name, INITIAL[name]) for name in ENSEMBLES)]
        played = History(*make_repository(folder, models))
        played.expected.files.update(INITIAL)
        await played.load("g")
        played.check()
        for what, *arguments in history:
            if what.startswith("change"):
                (content,) = arguments
                played.change(*content)
                if what == "change and load":
                    await played.load(content[0])
            elif what == "load":
                await played.load(*arguments)
            elif what == "unload":
                await played.unload(*arguments)
            elif what == "ask":
                played.ask(*arguments)
            else:
                played.answer(*arguments)
            played.check()
        await played.end()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))
