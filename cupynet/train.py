"""`python -m cupynet.train` is `cupynet train`."""

from cupynet.commands.train import main

if __name__ == "__main__":
    main()
