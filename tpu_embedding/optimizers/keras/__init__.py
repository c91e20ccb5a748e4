"""Translation of Keras optimizer and schedule configurations.

* `config`: `from_keras_config` reads and checks a configuration.
* `classes`: Keras' optimizer classes, with their defaults and equivalents here.
* `schedules`: Keras' learning rate schedules, as functions of the step.
"""
