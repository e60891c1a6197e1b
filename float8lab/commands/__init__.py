"""The longer commands of ``python -m float8lab``, and the functions that print the results."""
