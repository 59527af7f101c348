"""Open a bundle, draft, translate, verify and stream text. Needs no torch."""
