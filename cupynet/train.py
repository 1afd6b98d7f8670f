"""`python -m cupynet.train` is equivalent to `cupynet train`."""

from cupynet.commands.train import main

if __name__ == "__main__":
    main()
