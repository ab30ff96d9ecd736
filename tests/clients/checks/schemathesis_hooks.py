"""Loaded by schemathesis: its requests ask for the served model, so that they get past that."""

from __future__ import annotations

from typing import Any

import schemathesis
from checklist import surroundings


@schemathesis.hook
def before_load_schema(context: object, raw_schema: dict[str, Any]) -> None:
    for schema in raw_schema["components"]["schemas"].values():
        model = schema.get("properties", {}).get("model")
        if model is not None:
            schema["properties"]["model"] = {"enum": [surroundings.model, None]}
