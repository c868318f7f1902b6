"""For MkDocs: the documents link to sources by paths of the repository, which the site does not hold."""

import re

_OUTSIDE = re.compile(r"\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown, page, config, files):
    return _OUTSIDE.sub(rf"]({config.repo_url.rstrip('/')}/blob/main/\1)", markdown)
