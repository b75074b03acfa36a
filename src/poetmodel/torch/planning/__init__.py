"""What plans of all doors share: budgets, reserves, cached solves, records, messages."""
