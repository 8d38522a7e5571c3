"""Files that other programs read fit their schemas: GitHub's, Docker's, the citation's."""

import re
import sys

import pytest

import megatron_zpp
from tests.conftest import ROOT
from tests.tools import run

SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[bf]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "dependabot": ".github/dependabot.yml",
    "compose-spec": "compose.yaml",
    "citation-file-format": "CITATION.cff",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_that_other_services_read_fit_their_schemas(schema):
    files = [*ROOT.glob(SCHEMAS[schema])]
    assert files
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def test_the_image_has_what_continuous_integration_installs():
    wanted = re.findall(r'packages="\$packages (\S+)"', (ROOT / ".ci" / "run").read_text())
    assert wanted and set(wanted) <= set(re.findall(r"[\w+-]+", (ROOT / "Dockerfile").read_text()))


def test_there_is_one_version():
    assert f"version: {megatron_zpp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {megatron_zpp.__version__} (" in (ROOT / "CHANGELOG.md").read_text()
