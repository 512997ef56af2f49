"""Path of the Chromium browser, which the system provides and not a Python package."""

import shutil


def chromium_path() -> str:
    """Return the path of Chromium. Raises: AssertionError that names the package to install."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise AssertionError(
        "no Chromium for the browser tests; install it with: apt-get install chromium"
    )
