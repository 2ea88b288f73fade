"""Strict checks of Kubernetes manifests against the schemas of their objects."""

import json
from functools import cache
from pathlib import Path

SCHEMAS = Path(__file__).parent / "data" / "kubernetes_objects.json"


def manifest_errors(document: dict) -> list[str]:
    """Return what is wrong in an object: unknown fields, types, missing fields, each with its path."""
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    if kind not in _schemas()["objects"]:
        return [f"{kind}: no schema of it in {SCHEMAS.name}"]
    errors = sorted(_validator(kind).iter_errors(document), key=lambda error: list(error.path))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]


@cache
def _schemas() -> dict:
    return json.loads(SCHEMAS.read_text())


@cache
def _validator(kind: str):
    import jsonschema

    schemas = _schemas()
    root = {"$ref": f"#/$defs/{schemas['objects'][kind]}", "$defs": schemas["$defs"]}
    return jsonschema.Draft202012Validator(root)
