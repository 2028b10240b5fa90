"""`python -m headway`: the command line, for an environment whose scripts are not on the path."""

from headway.cli.main import main

if __name__ == "__main__":
    main()
