"""Version directories and version policies."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpubridge.config import VersionPolicy, available_versions, select_versions, served_versions
from gpubridge.errors import BridgeError, ErrorCode

LATEST = VersionPolicy("latest", latest=1)


def model_with(directory, *names):
    for name in names:
        (directory / name).mkdir()
    return directory


def test_only_canonical_positive_decimals_are_versions(tmp_path):
    ignored = ["0", "-1", "+7", "02", "3x", "0x9", "5.0", " 4", "abc", "\u0661"]
    ignored += ["9223372036854775808", "configs", "1_0"]
    model_with(tmp_path, "1", "10", "2", "9223372036854775807", *ignored)
    assert available_versions(tmp_path) == [1, 2, 10, 9223372036854775807]


def test_a_file_is_no_version_and_a_link_to_a_directory_is(tmp_path):
    (tmp_path / "1").touch()
    (tmp_path / "real").mkdir()
    (tmp_path / "2").symlink_to("real")
    (tmp_path / "3").symlink_to("nowhere")
    assert available_versions(tmp_path) == [2]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LATEST, [10]),
        (VersionPolicy("latest", latest=2), [3, 10]),
        (VersionPolicy("latest", latest=9), [1, 3, 10]),
        (VersionPolicy("latest", latest=0), []),
        (VersionPolicy("all"), [1, 3, 10]),
        (VersionPolicy("specific", versions=(10, 1, 1)), [1, 10]),
        (VersionPolicy("specific", versions=(3, 7)), [3]),
        (VersionPolicy("specific"), []),
    ],
)
def test_select_versions(policy, expected):
    assert select_versions(policy, [10, 1, 3]) == expected


@given(st.sets(st.integers(1, 2**63 - 1)), st.integers(0, 8))
def test_latest_are_the_highest(available, count):
    selected = select_versions(VersionPolicy("latest", latest=count), available)
    assert len(selected) == min(count, len(available))
    assert selected == sorted(selected)
    assert all(other < min(selected) for other in available - set(selected) if selected)


def test_served_versions(tmp_path):
    assert served_versions(model_with(tmp_path, "1", "2"), "m", LATEST, "here/1") == [2]


@pytest.mark.parametrize(
    ("names", "policy", "why"),
    [
        ((), LATEST, "(versions found: none; policy: latest 1)"),
        (("0", "abc"), VersionPolicy("all"), "(versions found: none; policy: all)"),
        (
            ("1", "2"),
            VersionPolicy("specific", versions=(5, 6)),
            "(versions found: 1, 2; policy: specific 5, 6)",
        ),
        (
            ("1",),
            VersionPolicy("specific"),
            "(versions found: 1; policy: specific (an empty list))",
        ),
    ],
)
def test_no_version_to_serve(tmp_path, names, policy, why):
    with pytest.raises(BridgeError) as caught:
        served_versions(model_with(tmp_path, *names), "m", policy, "here/1")
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        "at least one version must be available under the version policy of model 'm': put "
        f"the model's file into a directory such as here/1 {why}"
    )


def test_no_model_directory(tmp_path):
    with pytest.raises(BridgeError, match="cannot list the model directory") as caught:
        available_versions(tmp_path / "nowhere")
    assert caught.value.code is ErrorCode.NOT_FOUND
