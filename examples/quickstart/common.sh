# What the quickstart's scripts share. TASK: made by make_task.py; RUNS: where runs are written.
PYTHON=${PYTHON:-.venv/bin/python}
TASK=${TASK:-data/sort6}
RUNS=${RUNS:-runs/sort6}
