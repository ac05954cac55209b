"""`python -m slidedp`."""

# Ranks import this module as they start: only the command itself may load the rest.
if __name__ == "__main__":
    import sys

    from slidedp.cli import main

    sys.exit(main())
