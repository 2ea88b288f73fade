"""Differences that random requests and configurations may show, with the rows of differences.md that explain them."""

import re
from typing import NamedTuple


class Row(NamedTuple):
    """A class of differences: patterns of its kind, fault and outcomes, and how its row's situation begins."""

    situation: str
    kind: str = ""
    fault: str = ""
    theirs: str = ""
    ours: str = ""


NO_ANSWER = "(Triton died, hung up or was silent)"
"""What stands for all cases in which there is nothing to compare with."""
ROWS = (
    Row("status of an error in what a client sent", "", "", "500", "400"),
    Row(
        "a number beyond its datatype in JSON",
        "generate|infer",
        ".*9223372036854775808",
        "200",
        "400",
    ),
    Row("an integer parameter of 2^63 and more", "generate|infer", ".*", "200", "200"),
    Row(
        "JSON values beside a shape without elements",
        "infer",
        "another shape|odd input.data",
        "",
        "[45]00",
    ),
    Row(
        "`classification` of 2^63 and more",
        "infer",
        "odd output.parameters.classification",
        "200",
        "200|400",
    ),
    Row("a body of an unload that is no JSON", "unload", "odd", "200", "400"),
    Row(
        "order of a request's inputs, and which of several faults",
        "generate",
        "IN is ",
        "500",
        "400",
    ),
    Row(
        "a configuration with the number of an enumeration's value",
        "load",
        ".*: (7|9)",
        "200",
        "[45]00",
    ),
    Row(
        "a control input or a state that has the name of an input",
        "load",
        '.*name: "IN" control',
        "200",
        "[45]00",
    ),
    Row("JSON of a configuration that a client sends", "load", "sent: malformed", "200", "[45]00"),
    Row("KIND_AUTO with `gpus: [ 0 ]`", "load", "file: instances KIND_AUTO gpus", "400", "200"),
    Row(
        "status of a load that a fault in the scheduler's settings",
        "load",
        ".*_batching",
        "500",
        "400",
    ),
)


def row_of(kind: str, fault: str, theirs: str, ours: str) -> str | None:
    """Return the situation of the row that explains a difference, or None."""
    if theirs in ("died", "closed", "silent"):
        return NO_ANSWER
    for row in ROWS:
        patterns = (row.kind, kind), (row.fault, fault), (row.theirs, theirs), (row.ours, ours)
        if all(re.match(pattern, value, re.DOTALL) for pattern, value in patterns):
            return row.situation
    return None
