"""What the documentation shows as settings is accepted as settings, and every field it names."""

import re
from pathlib import Path

import pytest

from cluster import yamlfile
from core.spec import ClusterSpec, from_mapping
from router.openai import (
    CHAT_FIELDS,
    CHAT_REFUSED,
    COMPLETION_FIELDS,
    COMPLETION_REFUSED,
    IGNORED,
)

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", (DOCS / "configuration.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_spec(example: str) -> None:
    spec = from_mapping(ClusterSpec, yamlfile.parse(example, "docs"))
    assert spec != ClusterSpec()


def test_the_tables_of_the_api_name_every_field_that_is_served_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    served = CHAT_FIELDS - CHAT_REFUSED.keys() | COMPLETION_FIELDS - COMPLETION_REFUSED.keys()
    assert named == served - IGNORED
