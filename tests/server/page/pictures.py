"""Makes the pictures of the chat page in docs/: `PYTHONPATH=tests/server python tests/server/page/pictures.py`."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from tests.server.browser import DESKTOP, PHONE, chromium
from tests.server.fake_server import Reply, answer, serving
from tests.server.served_page import serve_page

DOCS = Path(__file__).parents[3] / "docs"
SAID = """A sum of squares has a closed form:

$$\\sum_{i=1}^{n} i^2 = \\frac{n(n+1)(2n+1)}{6}$$

```python
def squares(n: int) -> int:
    \"\"\"The sum of the first n squares.\"\"\"
    return n * (n + 1) * (2 * n + 1) // 6
```

For $n = 3$ it is **14**."""


def main() -> None:
    """A picture for a desktop, a phone and the dark theme."""
    with serving() as server, chromium() as browser:
        serve_page(server)
        for name, size, colors in (
            ("chat", DESKTOP, "light"),
            ("chat-phone", PHONE, "light"),
            ("chat-dark", DESKTOP, "dark"),
        ):
            with browser.page(size, colors) as page:  # type: ignore[arg-type]
                server.replies += [Reply(answer("Gladly.")), Reply(answer(SAID))]
                page.open(server.url)
                page.ask("Give me the sum of the first n squares.")
                page.wait_until_done()
                page.tab.get_by_role("button", name="Retry").click()
                page.tab.locator(".katex").nth(1).wait_for()
                page.wait_until_done()
                page.tab.locator(".hljs-keyword").first.wait_for()
                # A script's speed is nobody's.
                page.tab.locator(".figures").evaluate("(node) => { node.style.display = 'none'; }")
                page.tab.evaluate("document.fonts.ready.then(() => null)")
                picture = Image.open(io.BytesIO(page.tab.screenshot())).convert("RGB").quantize(128)
                picture.save(DOCS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
