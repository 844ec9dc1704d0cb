"""The programs that try; they run in containers, on Python 3.11's standard library alone."""
