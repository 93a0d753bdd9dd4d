"""`python -m kilat.cli`, for where the `kilat` script is not on the path."""

from kilat.cli.app import main

if __name__ == "__main__":
    main()
