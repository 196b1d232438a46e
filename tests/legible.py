"""How legible a page is: the contrast of each text with what is behind it, and whether the page is light or dark."""

from __future__ import annotations

from typing import Any

from chromium import Page

# As in WCAG 2.2, criterion 1.4.3: large text may have less contrast, and what cannot be used has no threshold.
NORMAL, LARGE = 4.5, 3.0
_SCRIPT = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const known = new Map();
  const read = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data].map((one) => one / 255));
    }
    return known.get(colour);
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((one, at) => one * a + below[at] * (1 - a));
  const base = matchMedia('(prefers-color-scheme: dark)').matches ? [0.07, 0.07, 0.07] : [1, 1, 1];
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.push(read(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), base);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
    const style = getComputedStyle(element);
    if (!text || element.closest('script, style, svg, option, [disabled], [hidden], [aria-hidden=true]')) continue;
    if (style.visibility === 'hidden' || !element.getClientRects().length) continue;
    let opacity = 1;
    for (let one = element; one; one = one.parentElement) opacity *= Number(getComputedStyle(one).opacity);
    const ground = behind(element), [r, g, b, a] = read(style.color);
    const [bright, dim] = [light(over([r, g, b, a * opacity], ground)), light(ground)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    found.push([(bright + 0.05) / (dim + 0.05), large, `${element.tagName}.${element.className} ${text.slice(0, 40)}`]);
  }
  return { texts: found, page: light(behind(document.body)) };
})()
"""


def read_contrast(page: Page) -> dict[str, Any]:
    """Texts of the page, each with its contrast, whether it is large, and its place; luminance of the page's ground."""
    found: dict[str, Any] = page.run(_SCRIPT)
    return found


def illegible(page: Page, *, dark: bool | None = None) -> list[tuple[float, str]]:
    """Texts with too little contrast, those with least first; empty where all can be read.

    Args:
        dark: whether the page must be dark; None where that does not matter.
    """
    found = read_contrast(page)
    assert found["texts"], "the page has no text"
    assert dark in (None, found["page"] < 0.2)
    rated = ((round(ratio, 2), place, LARGE if large else NORMAL) for ratio, large, place in found["texts"])
    return sorted((ratio, place) for ratio, place, least in rated if ratio < least)
