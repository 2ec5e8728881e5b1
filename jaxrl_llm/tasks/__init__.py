"""Training tasks that are made, not loaded: functions that return records, named `jaxrl_llm.tasks:addition`.

`addition`, `column_sums` and `column_pairs` return lists. The others return `Generated`: records made when they are
read, of one difficulty or of several, with splits that no content has in common. docs/data.md has a table of them all.
"""

from jaxrl_llm.tasks.game import countdown
from jaxrl_llm.tasks.generated import Generated
from jaxrl_llm.tasks.ordering import max_of_n, sorting
from jaxrl_llm.tasks.stories import word_problems
from jaxrl_llm.tasks.sums import MOST_RECORDS, addition, arithmetic, column_pairs, column_sums, products

__all__ = [
    "MOST_RECORDS",
    "Generated",
    "addition",
    "arithmetic",
    "column_pairs",
    "column_sums",
    "countdown",
    "max_of_n",
    "products",
    "sorting",
    "word_problems",
]
