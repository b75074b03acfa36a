"""What tests are made of: problems, graphs, steps, processes, pages."""
