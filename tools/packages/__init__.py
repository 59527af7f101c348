"""`omnidraft pack`: what one platform needs of a bundle, in one archive."""
