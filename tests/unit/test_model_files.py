"""Changes of a model's files, and writes that are none."""

import os

import pytest

from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.repository.loader import NotPrepared
from gpubridge.engine.repository.model_files import read_model_files
from gpubridge.engine.repository.model_sources import ModelSources
from gpubridge.errors import BridgeError


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "m"
    for version in ("1", "2", "x", "03"):
        (directory / version / "deep").mkdir(parents=True)
        (directory / version / "model.py").write_text("a")
        (directory / version / "deep" / "data").write_text("a")
    (directory / "config.pbtxt").write_text("a")
    (directory / "labels.txt").write_text("a")
    return directory


def parts_that_differ(before, after):
    parts = {"config", "shared"} - {
        p for p in ("config", "shared") if getattr(before, p) == getattr(after, p)
    }
    versions = before.versions.keys() | after.versions.keys()
    return parts | {v for v in versions if before.versions.get(v) != after.versions.get(v)}


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("config.pbtxt", "config"),
        ("labels.txt", "shared"),
        ("x/model.py", "shared"),
        ("03/deep/data", "shared"),
        ("1/config.pbtxt", 1),
        ("1/model.py", 1),
        ("2/deep/data", 2),
        ("2/deep/new", 2),
        ("new", "shared"),
    ],
)
def test_a_change_belongs_to_one_part(model, path, part):
    before = read_model_files(model)
    (model / path).write_text("longer")
    assert parts_that_differ(before, read_model_files(model)) == {part}


def test_a_file_of_the_same_size_differs_by_its_time(model):
    before = read_model_files(model)
    os.utime(model / "1" / "model.py", ns=(1, 1))
    assert parts_that_differ(before, read_model_files(model)) == {1}


def test_bytecode_caches_are_no_change(model):
    before = read_model_files(model)
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.pyc").write_text("a")
    assert read_model_files(model) == before


def test_a_version_that_goes_is_a_change(model):
    before = read_model_files(model)
    (model / "2").rename(model / "4")
    assert parts_that_differ(before, read_model_files(model)) == {2, 4}


def test_links_are_followed_and_do_not_go_round_in_circles(model, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.py").write_text("a")
    (model / "5").symlink_to(tmp_path / "elsewhere")
    (model / "1" / "round").symlink_to(model)
    (model / "1" / "nowhere").symlink_to(tmp_path / "nowhere")
    before = read_model_files(model)
    (tmp_path / "elsewhere" / "model.py").write_text("longer")
    assert 5 in parts_that_differ(before, read_model_files(model))


def test_a_directory_that_several_versions_lead_to_is_part_of_each(model, tmp_path):
    (model / "4").symlink_to("2")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w").write_text("a")
    (model / "1" / "weights").symlink_to(tmp_path / "weights")
    (model / "shared").symlink_to(tmp_path / "weights")
    before = read_model_files(model)
    (model / "2" / "model.py").write_text("longer")
    between = read_model_files(model)
    assert parts_that_differ(before, between) == {2, 4}
    (tmp_path / "weights" / "w").write_text("longer")
    assert parts_that_differ(between, read_model_files(model)) == {1, "shared"}


@pytest.mark.parametrize("link", ["5", "1/used"])
def test_a_link_that_leads_elsewhere_is_a_change(model, tmp_path, link):
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "model.py").write_text("a")
        # As builds that are to be repeatable make them.
        os.utime(folder / "model.py", ns=(1, 1))
    (model / link).symlink_to(tmp_path / "one")
    before = read_model_files(model)
    assert before == read_model_files(model)
    (model / link).unlink()
    (model / link).symlink_to(tmp_path / "two")
    assert parts_that_differ(before, read_model_files(model)) == {int(link[0])}


def test_links_back_and_forth_are_listed_in_few_entries(model):
    # Each leads to all the others: there are 2 ** 12 paths without a circle alone.
    for number in range(12):
        folder = model / "1" / f"d{number}"
        folder.mkdir()
        for other in range(12):
            (folder / f"to{other}").symlink_to(f"../d{other}")
    assert len(read_model_files(model).versions[1]) < 200


def test_a_directory_that_is_not_there_has_no_files(tmp_path):
    assert read_model_files(tmp_path / "nope").versions == {}


async def test_the_models_of_a_repository_are_its_directories(tmp_path):
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "to_file").symlink_to("file")
    (tmp_path / "to_a").symlink_to("a")

    assert await ModelSources(LoadThreads(), [tmp_path]).names() == ["a", "b", "to_a"]


async def test_folders_that_tools_make_are_no_models(tmp_path, caplog):
    for name in ("lost+found", "__pycache__", ".hidden", "m"):
        (tmp_path / name / "1").mkdir(parents=True)
    sources = ModelSources(LoadThreads(), [tmp_path])
    assert await sources.names() == ["m"]
    with pytest.raises(NotPrepared, match="not found"):
        await sources.locate("lost+found")
    assert not caplog.records


async def test_a_repository_without_models_is_an_error_unless_it_may_be_empty(tmp_path):
    for name in ("full/m", "empty/__pycache__"):
        (tmp_path / name / "1").mkdir(parents=True)
    sources = ModelSources(LoadThreads(), [tmp_path / "full", tmp_path / "empty"])
    found = [names async for names in sources.listings(may_be_empty=True)]
    assert sorted(found) == [[], [], ["m"]]
    with pytest.raises(BridgeError, match=r"no model in .*empty: .*--allow-empty-repository=true"):
        async for _ in sources.listings(may_be_empty=False):
            pass


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("modles", r"stat .*/modles: No such file or directory; did you mean .*/models\?"),
        ("models/m/1", r"no model in .*/m/1: .*, and this has a model.py: serve .*/models/m;"),
    ],
)
async def test_a_place_that_is_no_repository_is_told_with_what_is_near(tmp_path, asked, told):
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "1" / "model.py").touch()
    sources = ModelSources(LoadThreads(), [tmp_path / asked])
    with pytest.raises(BridgeError, match=told):
        async for _ in sources.listings(may_be_empty=False):
            pass
