"""The DSpark drafter: context rows from the target's taps, blocks of query rows, and the heads that draft."""
