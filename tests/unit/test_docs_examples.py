"""What the documentation shows as settings is accepted as settings."""

import re
from pathlib import Path

import pytest

from cluster import yamlfile
from core.spec import ClusterSpec, from_mapping

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_spec(example: str) -> None:
    spec = from_mapping(ClusterSpec, yamlfile.parse(example, "docs"))
    assert spec != ClusterSpec()
