"""Size of files and classes: a file holds one concept, in 600 lines at most; ruff keeps functions simple."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 600
MOST_FIELDS = 15
WIDE = {"StubConnection", "StubDevice", "TlsConnection"}
"""Classes with more fields: each is one end of a connection, or one device, with its state, or all that
a message says."""
KINDS = {".py", ".cpp", ".h", ".cu", ".cuh", ".js"}
MADE = {"build", "demo-output", "dist"}


def too_long(root):
    """Return each file of code that has too many lines, with their number."""
    folders = [each for each in root.iterdir() if each.is_dir() and each.name not in MADE]
    files = [
        path
        for folder in folders
        if not folder.name.startswith(".")
        for path in folder.rglob("*")
        if path.suffix in KINDS
    ]
    assert files
    lines = {path.relative_to(root): path.read_bytes().count(b"\n") for path in files}
    return {str(path): count for path, count in lines.items() if count > MOST}


def test_no_file_is_too_long():
    assert too_long(ROOT) == {}


def test_a_file_that_is_too_long_is_found(tmp_path):
    folder = tmp_path / "package" / "inner"
    folder.mkdir(parents=True)
    (folder / "long.py").write_text("x = 1\n" * (MOST + 1))
    (folder / "short.py").write_text("x = 1\n" * MOST)
    assert too_long(tmp_path) == {"package/inner/long.py": MOST + 1}


def fields_of(kind):
    """Return the fields of a class: those it declares, its slots, and what `__init__` assigns."""
    names = set()
    for part in kind.body:
        match part:
            case ast.AnnAssign(target=ast.Name(id=name)) if "ClassVar" not in ast.unparse(
                part.annotation
            ):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                slots = ast.literal_eval(part.value)
                names |= {slots} if isinstance(slots, str) else set(slots)
            case ast.FunctionDef(name="__init__"):
                for each in ast.walk(part):
                    match each:
                        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                            names.add(each.attr)
    return names


def classes_in(node):
    """Return the classes among the statements of a module, class, function or condition."""
    for each in getattr(node, "body", ()):
        if isinstance(each, ast.ClassDef):
            yield each
        yield from classes_in(each)


def too_wide(root):
    """Return the number of fields of each class that has too many."""
    kinds = [
        each for path in root.rglob("*.py") for each in classes_in(ast.parse(path.read_text()))
    ]
    assert kinds
    counts = {kind.name: len(fields_of(kind)) for kind in kinds}
    return {name: count for name, count in counts.items() if count > MOST_FIELDS}


def test_four_classes_have_many_fields():
    assert set(too_wide(ROOT / "gpubridge")) == WIDE


def test_a_class_with_too_many_fields_is_found(tmp_path):
    names = [f"field_{number}" for number in range(MOST_FIELDS + 1)]
    (tmp_path / "kinds.py").write_text(
        "class Declared:\n    known: ClassVar[int] = 0\n"
        + "".join(f"    {name}: int\n" for name in names)
        + f"class Slotted:\n    __slots__ = {names}\n"
        + "class Assigned:\n    def __init__(self):\n"
        + "".join(f"        self.{name} = 0\n" for name in names)
        + f"class Narrow:\n    __slots__ = {names[1:]}\n"
    )
    assert too_wide(tmp_path) == dict.fromkeys(("Declared", "Slotted", "Assigned"), MOST_FIELDS + 1)
