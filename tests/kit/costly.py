"""Problems whose costs span many powers of ten, and their models as files for other solvers."""

from dataclasses import replace

from kit.instances import make_rng, random_costs, random_graph, random_problem, state_problem
from kit.oracle import TooManyLabelsError, optimum
from poetmodel.device import Costs
from poetmodel.model import read_schedule
from poetmodel.schedule import check_schedule


def costly_problem(seed, low=-3, high=7, *, minimize=None):
    """Draw a problem with storage whose transfers cost `10**low` to `10**high` single passes.

    Every fourth seed has transfers of one power of ten each way, and every third has state. Returns
    None if the drawn problem has no storage.
    """
    rng = make_rng(f"costly/{seed}")
    chosen = {"deadline": False, "energy_budget": False, "aux_limit": False}
    goal = minimize or rng.choice(("energy", "energy", "time", "writes", "ram"))
    fixed = {"minimize": goal, "deadline_counts": "serial"}
    if seed % 3 == 0:
        problem = state_problem(seed, (3, 5), **chosen, **fixed)
    else:
        graph = random_graph(rng, (3, 6))
        problem = random_problem(rng, graph, random_costs(rng, graph), **chosen, **fixed)
    table = problem.table
    if not table.has_storage:
        return None
    pass_s, pass_j = sum(table.compute_time_s) or 1, sum(table.compute_energy_j) or 1
    common = rng.uniform(low, high)

    def stretch(times, energies):
        powers = [rng.uniform(low, high) if seed % 4 else common for _ in times]
        return [
            (pass_s * 10**power if s else 0, pass_j * 10**power if j else 0)
            for s, j, power in zip(times, energies, powers, strict=True)
        ]

    costs = Costs.from_arrays(
        problem.graph,
        compute_time_s=table.compute_time_s,
        compute_energy_j=table.compute_energy_j,
        page_in=stretch(table.page_in_time_s, table.page_in_energy_j),
        page_out=stretch(table.page_out_time_s, table.page_out_energy_j),
        device=problem.costs.device,
    )
    return replace(problem, costs=costs)


def find_optimum(problem, max_labels=100_000):
    """Return the optimum of the search, None if infeasible or if the search takes too long."""
    try:
        return optimum(problem, max_labels=max_labels)
    except TooManyLabelsError:
        return None


def solve_file(model, path, solver):
    """Write a model to `path`, solve the file; return its optimum, and the simulated schedule.

    The optimum is in the unit of the problem's objective, without the baseline. Asserts that the
    schedule is valid.
    """
    _, labels = model.write(str(path), io_options={"symbolic_solver_labels": True})
    value, values = {"highs": _solve_with_highs, "scip": _solve_with_scip}[solver](str(path))
    symbols = model.solutions.symbol_map[labels]
    for name, number in values.items():
        variable = symbols.getObject(name)
        if variable is not symbols.UnknownSymbol:
            variable.set_value(number, skip_validation=True)
    schedule = read_schedule(model)
    return value * model.objective_unit, check_schedule(model.problem, schedule)


def _solve_with_highs(path):
    import highspy

    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 1e-7)
    solver.readModel(path)
    solver.run()
    values = dict(zip(solver.getLp().col_names_, solver.getSolution().col_value, strict=True))
    return solver.getInfo().objective_function_value, values


def _solve_with_scip(path):
    from pyscipopt import Model

    solver = Model()
    solver.hideOutput()
    solver.readProblem(path)
    solver.optimize()
    best = solver.getBestSol()
    columns = solver.getVars(transformed=False)
    return solver.getObjVal(), {column.name: solver.getSolVal(best, column) for column in columns}
