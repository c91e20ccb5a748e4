"""The training loop: its files, in the order in which a run reaches them.

Before the first step, the run is checked and its directory claimed:

    training_loop   `train`, which calls all the others
    run_program     checks a run, and makes its program of the next three
    checked_data    a data set whose batches fit the config
    run_plan        the plan, the same in all processes
    step            state, train step and evaluation step
    agreements      all processes run the same steps on the same data
    run_directory   locks the directory, and moves an earlier run aside

At each step:

    read_ahead      prepares the next batch, and puts it on the devices
    loaders         reads batches, in this process or in others
    profiling       records a profile of a window of steps
    step_meter      reads metrics late, and measures the wait for input
    run_saver       saves the state in the background

For the user:

    reporting       lines on the screen, records in files, and the plot
    tensorboard     the same numbers as TensorBoard scalars
    run_summary     what a run is, how it starts and how it ends

Two files serve other commands:

    ahead_of_time   the programs that `tpu-embedding compile` compiles
"""
