"""For MkDocs: the first page is the README, and links to files that the site does not hold lead to the repository."""

import pathlib
import re

from mkdocs.structure.files import File

_FROM_DOCS = re.compile(r"\]\(\.\./([^)]+)\)")
_FROM_README = re.compile(r"\]\((?!https?:|docs/)([^)]+)\)")


def _in_repository(config):
    return rf"]({config.repo_url.rstrip('/')}/blob/main/\1)"


def on_files(files, config):
    text = pathlib.Path(config.config_file_path).with_name("README.md").read_text()
    text = _FROM_README.sub(_in_repository(config), text).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    return _FROM_DOCS.sub(_in_repository(config), markdown)
