"""The statement count of scripts/source_survey.py."""

import ast

from source_survey import statements_of

SOURCE = '''
"""A module."""

LIMIT = 3  # a comment


class Counter:
    """A class."""

    """A string after the docstring is a statement."""

    async def count(self):
        """A method."""
        if LIMIT:
            return 1
'''


def test_count_excludes_docstrings_and_includes_nested_statements() -> None:
    assert statements_of(ast.parse(SOURCE)) == 6
    assert statements_of(ast.parse('"""Only a docstring."""')) == 0
