"""The page that shows which kernel serves which shape, and why: one HTML document, no assets, no framework, escaped."""

from mla_serve.pages.render import page_headers, render_page
from mla_serve.pages.served import served_page

__all__ = ["page_headers", "render_page", "served_page"]
